"""The body of a kernel: integers, addresses and vectors with Python's operators.

Addresses are integers of 64 bits. Arithmetic of floats is rounded operation by operation; only
`fma` fuses. Vectors may be longer than those of the processor, which then takes several.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from llvmlite import ir


class _BFloat(ir.Type):
    """bfloat, which llvmlite does not name."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
F16, BF16, F32 = ir.HalfType(), _BFloat(), ir.FloatType()
_FLOATS = (ir.HalfType, _BFloat, ir.FloatType, ir.DoubleType)
_POINTER = ir.PointerType()


def vector(element: ir.Type, count: int) -> ir.VectorType:
    """The type of `count` elements side by side."""
    return ir.VectorType(element, count)


I8X16, F32X16 = vector(I8, 16), vector(F32, 16)


def _is_float(type: ir.Type) -> bool:
    return isinstance(getattr(type, "element", type), _FLOATS)


class Value:
    """A number or vector in a register. Operators take a Value of the same type or a constant."""

    __slots__ = ("_builder", "ir")

    def __init__(self, builder: ir.IRBuilder, value: ir.Value) -> None:
        self._builder = builder
        self.ir = value

    @property
    def type(self) -> ir.Type:
        return self.ir.type

    def _other(self, other: Value | float) -> ir.Value:
        return other.ir if isinstance(other, Value) else _constant(self.type, other)

    def _binary(self, name: str, other: Value | float) -> Value:
        return Value(self._builder, getattr(self._builder, name)(self.ir, self._other(other)))

    def __add__(self, other: Value | float) -> Value:
        return self._binary("fadd" if _is_float(self.type) else "add", other)

    def __sub__(self, other: Value | float) -> Value:
        return self._binary("fsub" if _is_float(self.type) else "sub", other)

    def __mul__(self, other: Value | float) -> Value:
        return self._binary("fmul" if _is_float(self.type) else "mul", other)

    def __truediv__(self, other: Value | float) -> Value:
        return self._binary("fdiv", other)

    def __floordiv__(self, other: Value | int) -> Value:
        return self._binary("udiv", other)

    def __mod__(self, other: Value | int) -> Value:
        return self._binary("urem", other)

    def __and__(self, other: Value | int) -> Value:
        return self._binary("and_", other)

    def __or__(self, other: Value | int) -> Value:
        return self._binary("or_", other)

    def __lshift__(self, other: Value | int) -> Value:
        return self._binary("shl", other)

    def __rshift__(self, other: Value | int) -> Value:
        """Bits moved down, zeros moved in."""
        return self._binary("lshr", other)

    def part(self, start: int, count: int) -> Value:
        """`count` neighbours out of a vector."""
        lanes = ir.Constant(vector(I32, count), list(range(start, start + count)))
        rest = ir.Constant(self.type, ir.Undefined)
        return Value(self._builder, self._builder.shuffle_vector(self.ir, rest, lanes))

    def spread(self, lane: int, count: int) -> Value:
        """One element of a vector, `count` times."""
        lanes = ir.Constant(vector(I32, count), [lane] * count)
        rest = ir.Constant(self.type, ir.Undefined)
        return Value(self._builder, self._builder.shuffle_vector(self.ir, rest, lanes))

    def beside(self, other: Value) -> Value:
        """Two vectors of one length as one."""
        count = self.type.count
        lanes = ir.Constant(vector(I32, 2 * count), list(range(2 * count)))
        return Value(self._builder, self._builder.shuffle_vector(self.ir, other.ir, lanes))

    def bits(self, type: ir.Type) -> Value:
        """The same bits read as another type."""
        return Value(self._builder, self._builder.bitcast(self.ir, type))

    def to_float(self, *, signed: bool) -> Value:
        """Integers as f32."""
        count = getattr(self.type, "count", None)
        to = F32 if count is None else vector(F32, count)
        convert = self._builder.sitofp if signed else self._builder.uitofp
        return Value(self._builder, convert(self.ir, to))

    def widen(self) -> Value:
        """f16 or bf16 as f32."""
        count = getattr(self.type, "count", None)
        to = F32 if count is None else vector(F32, count)
        return Value(self._builder, self._builder.fpext(self.ir, to))

    def round_to_bf16(self) -> Value:
        """f32 as bf16, to the nearest, ties to even."""
        to = BF16 if not isinstance(self.type, ir.VectorType) else vector(BF16, self.type.count)
        return Value(self._builder, self._builder.fptrunc(self.ir, to))

    def less(self, other: Value | float) -> Value:
        """Whether self < other, integers with their sign; false for NaN."""
        compare = "fcmp_ordered" if _is_float(self.type) else "icmp_signed"
        return Value(
            self._builder, getattr(self._builder, compare)("<", self.ir, self._other(other))
        )


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
    """Writes one function; see the module."""

    def __init__(self, builder: ir.IRBuilder) -> None:
        self.builder = builder

    def integer(self, value: int) -> Value:
        return Value(self.builder, _constant(I64, value))

    def constant(self, type: ir.Type, value: float) -> Value:
        """A number, or a vector full of it."""
        return Value(self.builder, _constant(type, value))

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
        more = self.builder.icmp_signed("<", index.value.ir, stop.ir)
        self.builder.cbranch(more, body, end)
        self.builder.position_at_end(body)
        now = index.value
        yield now
        index.set(now + step)
        self.builder.branch(head)
        self.builder.position_at_end(end)

    def load(self, address: Value, type: ir.Type, align: int = 1) -> Value:
        return Value(self.builder, self.builder.load(self._pointer(address), typ=type, align=align))

    def store(self, value: Value, address: Value, align: int = 1) -> None:
        self.builder.store(value.ir, self._pointer(address), align=align)

    def prefetch(self, address: Value) -> None:
        """Asks for memory that will be read soon."""
        pointer = Value(self.builder, self._pointer(address))
        to_read, stay, data = (self.constant(I32, n) for n in (0, 3, 1))
        self.call("llvm.prefetch.p0", ir.VoidType(), pointer, to_read, stay, data)

    def splat(self, value: Value, count: int = 16) -> Value:
        """A vector full of one number."""
        one = ir.Constant(vector(value.type, 1), ir.Undefined)
        single = self.builder.insert_element(one, value.ir, ir.Constant(I32, 0))
        return Value(self.builder, single).spread(0, count)

    def fma(self, a: Value, b: Value, c: Value) -> Value:
        """a * b + c, rounded once."""
        return self.call(f"llvm.fma.{_mangled(a.type)}", a.type, a, b, c)

    def sum(self, x: Value) -> Value:
        """All elements of a vector, added in pairs of halves."""
        while x.type.count > 1:
            half = x.type.count // 2
            x = x.part(0, half) + x.part(half, half)
        return Value(self.builder, self.builder.extract_element(x.ir, ir.Constant(I32, 0)))

    def call(self, name: str, type: ir.Type, *args: Value) -> Value:
        """A function of LLVM or of the C library."""
        module = self.builder.module
        function = module.globals.get(name)
        if function is None:
            signature = ir.FunctionType(type, [arg.type for arg in args])
            function = ir.Function(module, signature, name)
        return Value(self.builder, self.builder.call(function, [arg.ir for arg in args]))

    def choose(self, condition: Value, yes: Value, no: Value) -> Value:
        """One of two values, or element by element for a vector of conditions."""
        return Value(self.builder, self.builder.select(condition.ir, yes.ir, no.ir))

    @contextmanager
    def when(self, condition: Value) -> Iterator[None]:
        """The body if the condition holds."""
        with self.builder.if_then(condition.ir):
            yield

    def stack(self, n_bytes: int) -> Value:
        """The address of memory that lasts until the function returns."""
        with self.builder.goto_entry_block():
            memory = self.builder.alloca(I8, size=n_bytes)
            memory.align = 64
            return Value(self.builder, self.builder.ptrtoint(memory, I64))

    def exp(self, x: Value) -> Value:
        """e^x of f32 by the C library, a vector number by number."""
        return self.call(f"llvm.exp.{_mangled(x.type)}", x.type, x)

    def _pointer(self, address: Value) -> ir.Value:
        return self.builder.inttoptr(address.ir, _POINTER)


def _constant(type: ir.Type, value: float | Sequence[float]) -> ir.Constant:
    if isinstance(type, ir.VectorType):
        return ir.Constant(type, [ir.Constant(type.element, value)] * type.count)
    return ir.Constant(type, value)


def _mangled(type: ir.Type) -> str:
    short = {"float": "f32", "bfloat": "bf16", "half": "f16"}
    if isinstance(type, ir.VectorType):
        return f"v{type.count}{short.get(str(type.element), str(type.element))}"
    return short.get(str(type), str(type))
