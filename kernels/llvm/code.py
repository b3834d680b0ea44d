"""Code of a kernel while it is written: each method of `Code` appends instructions to a function.

Addresses are integers of 64 bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from llvmlite import ir

from kernels.llvm.values import I8, I32, I64, Value, constant, mangled, vector

_POINTER = ir.PointerType()
_GATHERS = {
    8: ("llvm.x86.avx2.gather.d.d.256", vector(I32, 8), I8),
    16: ("llvm.x86.avx512.mask.gather.dpi.512", vector(ir.IntType(1), 16), I32),
}
"""By how many numbers: a function, and the types of its mask and its scale."""


class Variable:
    """A number or vector that changes; LLVM keeps it in a register."""

    __slots__ = ("_builder", "_slot", "_type")

    def __init__(self, builder: ir.IRBuilder, first: Value) -> None:
        self._builder = builder
        self._type = first.type
        with builder.goto_entry_block():
            self._slot = builder.alloca(first.type)
        self.set(first)

    def set(self, value: Value) -> None:
        self._builder.store(value.ir, self._slot)

    @property
    def value(self) -> Value:
        return Value(self._builder, self._builder.load(self._slot, typ=self._type))


class Code:
    """Appends instructions to one LLVM function; Python's loops and conditions unroll it."""

    def __init__(self, builder: ir.IRBuilder) -> None:
        self.builder = builder

    def integer(self, value: int) -> Value:
        return Value(self.builder, constant(I64, value))

    def constant(self, type: ir.Type, value: float) -> Value:
        """A number, or a vector full of it."""
        return Value(self.builder, constant(type, value))

    def constants(self, type: ir.VectorType, values: Sequence[float]) -> Value:
        """A vector of these numbers."""
        parts = [ir.Constant(type.element, value) for value in values]
        return Value(self.builder, ir.Constant(type, parts))

    def variable(self, first: Value) -> Variable:
        return Variable(self.builder, first)

    @contextmanager
    def loop(self, start: Value | int, stop: Value, step: int = 1) -> Iterator[Value]:
        """The body for start, start + step, … below stop."""
        first = start if isinstance(start, Value) else self.integer(start)
        index = self.variable(first)
        names = ("head", "body", "end")
        head, body, end = (self.builder.append_basic_block(name) for name in names)
        self.builder.branch(head)
        self.builder.position_at_end(head)
        self.builder.cbranch(index.value.less(stop).ir, body, end)
        self.builder.position_at_end(body)
        now = index.value
        yield now
        index.set(now + step)
        self.builder.branch(head)
        self.builder.position_at_end(end)

    def stack(self, n_bytes: int) -> Value:
        """The address of memory that lasts until the function ends, on a cache line."""
        with self.builder.goto_entry_block():
            memory = self.builder.alloca(ir.ArrayType(I8, n_bytes))
            memory.align = 64
            return Value(self.builder, self.builder.ptrtoint(memory, I64))

    def load(self, address: Value, type: ir.Type, align: int = 1) -> Value:
        return Value(self.builder, self.builder.load(self._pointer(address), typ=type, align=align))

    def store(self, value: Value, address: Value, align: int = 1) -> None:
        self.builder.store(value.ir, self._pointer(address), align=align)

    def store_past_caches(self, value: Value, address: Value, align: int) -> None:
        """To memory that is not read soon: what was there is not read before, and nothing else
        leaves a cache for it. Other threads see it after the next locked instruction, such as
        every share of a program begins with. align: bytes; whole registers.
        """
        store = self.builder.store(value.ir, self._pointer(address), align=align)
        once = self.builder.module.add_metadata([ir.Constant(I32, 1)])
        store.set_metadata("nontemporal", once)

    def chosen(self, name: str, numbers: Sequence[int], index: Value) -> Value:
        """Numbers i32 at the indices in a vector i32, from a table that the program holds under a
        name."""
        table = self.builder.module.globals.get(name)
        if table is None:
            whole = ir.Constant(ir.ArrayType(I32, len(numbers)), list(numbers))
            table = ir.GlobalVariable(self.builder.module, whole.type, name)
            table.initializer, table.global_constant, table.linkage = whole, True, "internal"
        every, start = index.type, Value(self.builder, table)
        gather, mask, scale = _GATHERS[every.count]
        nothing, all_lanes = self.constant(every, 0), self.constant(mask, -1)
        return self.call(gather, every, nothing, start, index, all_lanes, self.constant(scale, 4))

    def copy(self, target: Value, source: Value, n_bytes: Value) -> None:
        """Bytes from one place to another, which do not overlap."""
        self.call("memcpy", I64, target, source, n_bytes)

    def prefetch(self, address: Value, *, near: bool = True) -> None:
        """Asks for memory that will be read soon, for the nearest cache or the one after it."""
        pointer = Value(self.builder, self._pointer(address))
        to_read, stay, data = (self.constant(I32, n) for n in (0, 3 if near else 2, 1))
        self.call("llvm.prefetch.p0", ir.VoidType(), pointer, to_read, stay, data)

    def splat(self, value: Value, count: int = 16) -> Value:
        """A vector full of one number."""
        return value.alone().spread(0, count)

    def fma(self, a: Value, b: Value, c: Value) -> Value:
        """a * b + c, rounded once."""
        return self.call(f"llvm.fma.{mangled(a.type)}", a.type, a, b, c)

    def sum(self, x: Value) -> Value:
        """All elements of a vector, added in pairs of halves."""
        while x.type.count > 1:
            half = x.type.count // 2
            x = x.part(0, half) + x.part(half, half)
        return Value(self.builder, self.builder.extract_element(x.ir, ir.Constant(I32, 0)))

    def maximum(self, x: Value) -> Value:
        """The largest element of a vector without NaN."""
        while x.type.count > 1:
            half = x.type.count // 2
            x = self.larger(x.part(0, half), x.part(half, half))
        return Value(self.builder, self.builder.extract_element(x.ir, ir.Constant(I32, 0)))

    def call(self, name: str, type: ir.Type, *args: Value) -> Value:
        """A function of LLVM or of the C library."""
        module = self.builder.module
        function = module.globals.get(name)
        if function is None:
            signature = ir.FunctionType(type, [arg.type for arg in args])
            function = ir.Function(module, signature, name)
        return Value(self.builder, self.builder.call(function, [arg.ir for arg in args]))

    def call_at(self, address: Value, *args: Value) -> None:
        """The function at an address, which returns nothing."""
        signature = ir.FunctionType(ir.VoidType(), [arg.type for arg in args])
        function = self.builder.inttoptr(address.ir, ir.PointerType(signature))
        self.builder.call(function, [arg.ir for arg in args])

    def choose(self, condition: Value, yes: Value, no: Value) -> Value:
        """One of two values, or element by element for a vector of conditions."""
        return Value(self.builder, self.builder.select(condition.ir, yes.ir, no.ir))

    def smaller(self, a: Value, b: Value) -> Value:
        """The smaller one; b where there is a NaN."""
        return self.choose(a.less(b), a, b)

    def larger(self, a: Value, b: Value) -> Value:
        """The larger one; b where there is a NaN."""
        return self.choose(b.less(a), a, b)

    @contextmanager
    def when(self, condition: Value) -> Iterator[None]:
        """The body if the condition holds."""
        with self.builder.if_then(condition.ir):
            yield

    @contextmanager
    def repeat(self, more: Callable[[], Value]) -> Iterator[None]:
        """The body as long as the condition that `more` writes holds."""
        head, body, end = (self.builder.append_basic_block(n) for n in ("head", "body", "end"))
        self.builder.branch(head)
        self.builder.position_at_end(head)
        self.builder.cbranch(more().ir, body, end)
        self.builder.position_at_end(body)
        yield
        self.builder.branch(head)
        self.builder.position_at_end(end)

    def sqrt(self, x: Value) -> Value:
        """Rounded as exactly as IEEE 754 asks."""
        return self.call(f"llvm.sqrt.{mangled(x.type)}", x.type, x)

    def load_first(self, address: Value, type: ir.Type, count: int) -> Value:
        """A vector of which only `count` elements are in memory; the others are zero."""
        if count == type.count:
            return self.load(address, type)
        pointer, align = Value(self.builder, self._pointer(address)), self.constant(I32, 1)
        mask, rest = self._first(type, count), self.constant(type, 0)
        return self.call(f"llvm.masked.load.{mangled(type)}.p0", type, pointer, align, mask, rest)

    def store_first(self, value: Value, address: Value, count: int) -> None:
        """Only the first `count` elements of a vector."""
        if count == value.type.count:
            return self.store(value, address)
        pointer, align = Value(self.builder, self._pointer(address)), self.constant(I32, 1)
        mask = self._first(value.type, count)
        name = f"llvm.masked.store.{mangled(value.type)}.p0"
        self.call(name, ir.VoidType(), value, pointer, align, mask)

    def _first(self, type: ir.Type, count: int) -> Value:
        lanes = [int(lane < count) for lane in range(type.count)]
        return Value(self.builder, ir.Constant(vector(ir.IntType(1), type.count), lanes))

    def _pointer(self, address: Value) -> ir.Value:
        return self.builder.inttoptr(address.ir, _POINTER)
