"""Numbers and vectors in registers, with Python's operators.

Arithmetic of floats is rounded operation by operation. Vectors may be longer than those of the
processor, which then takes several.
"""

from __future__ import annotations

from collections.abc import Sequence

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


def vector(element: ir.Type, count: int) -> ir.VectorType:
    """The type of `count` elements side by side."""
    return ir.VectorType(element, count)


MAGNITUDE = 0x7FFFFFFF
"""The bits of an f32 but for its sign."""
I8X16, I32X16, F32X16 = (vector(element, 16) for element in (I8, I32, F32))


def is_float(type: ir.Type) -> bool:
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
        return other.ir if isinstance(other, Value) else constant(self.type, other)

    def _binary(self, name: str, other: Value | float) -> Value:
        return Value(self._builder, getattr(self._builder, name)(self.ir, self._other(other)))

    def __add__(self, other: Value | float) -> Value:
        return self._binary("fadd" if is_float(self.type) else "add", other)

    def __sub__(self, other: Value | float) -> Value:
        return self._binary("fsub" if is_float(self.type) else "sub", other)

    def __mul__(self, other: Value | float) -> Value:
        return self._binary("fmul" if is_float(self.type) else "mul", other)

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

    def __xor__(self, other: Value | int) -> Value:
        return self._binary("xor", other)

    def __lshift__(self, other: Value | int) -> Value:
        return self._binary("shl", other)

    def __rshift__(self, other: Value | int) -> Value:
        """Bits moved down, zeros moved in."""
        return self._binary("lshr", other)

    def down_signed(self, bits: int) -> Value:
        """Bits moved down, copies of the sign moved in."""
        return self._binary("ashr", bits)

    def take(self, lanes: Sequence[int], other: Value | None = None) -> Value:
        """A vector of the elements so numbered; those of `other` come after this one's own."""
        rest = ir.Constant(self.type, ir.Undefined) if other is None else other.ir
        chosen = ir.Constant(vector(I32, len(lanes)), list(lanes))
        return Value(self._builder, self._builder.shuffle_vector(self.ir, rest, chosen))

    def take_in_fours(self, lanes: Sequence[int], other: Value | None = None) -> Value:
        """`take` of four elements within each four of both vectors: 0 to 3 are this one's."""
        count = self.type.count
        every = [
            first + lane if lane < 4 else count + first + lane - 4
            for first in range(0, count, 4)
            for lane in lanes
        ]
        return self.take(every, other)

    def part(self, start: int, count: int) -> Value:
        """`count` neighbours out of a vector."""
        return self.take(range(start, start + count))

    def spread(self, lane: int, count: int) -> Value:
        """One element of a vector, `count` times."""
        return self.take([lane] * count)

    def beside(self, other: Value) -> Value:
        """This vector and another of its length, joined."""
        return self.take(range(2 * self.type.count), other)

    def alone(self) -> Value:
        """A number as a vector of one."""
        one = ir.Constant(vector(self.type, 1), ir.Undefined)
        return Value(self._builder, self._builder.insert_element(one, self.ir, ir.Constant(I32, 0)))

    def interleaved(self, other: Value) -> tuple[Value, Value]:
        """First elements, second elements, … of two vectors of a length, as two of that length."""
        count = self.type.count
        mixed = [lane for i in range(count) for lane in (i, count + i)]
        return self.take(mixed[:count], other), self.take(mixed[count:], other)

    def bits(self, type: ir.Type) -> Value:
        """The same bits read as another type."""
        return Value(self._builder, self._builder.bitcast(self.ir, type))

    def resize(self, element: ir.Type) -> Value:
        """Integers of this width: zeros in front, or cut off."""
        count = getattr(self.type, "count", None)
        to = element if count is None else vector(element, count)
        wider = element.width > getattr(self.type, "element", self.type).width
        convert = self._builder.zext if wider else self._builder.trunc
        return self if to == self.type else Value(self._builder, convert(self.ir, to))

    def repeated(self, count: int) -> Value:
        """Every element `count` times in a row."""
        return self.take([i for i in range(self.type.count) for _ in range(count)])

    def extended(self, element: ir.Type) -> Value:
        """Integers of more bits, with their sign."""
        count = getattr(self.type, "count", None)
        to = element if count is None else vector(element, count)
        return Value(self._builder, self._builder.sext(self.ir, to))

    def to_float(self, *, signed: bool) -> Value:
        """Integers as f32."""
        count = getattr(self.type, "count", None)
        to = F32 if count is None else vector(F32, count)
        convert = self._builder.sitofp if signed else self._builder.uitofp
        return Value(self._builder, convert(self.ir, to))

    def to_integer(self, element: ir.Type) -> Value:
        """f32 as integers with a sign, cut off after the point; within their range only."""
        count = getattr(self.type, "count", None)
        to = element if count is None else vector(element, count)
        return Value(self._builder, self._builder.fptosi(self.ir, to))

    def widen(self) -> Value:
        """f16 or bf16 as f32."""
        count = getattr(self.type, "count", None)
        to = F32 if count is None else vector(F32, count)
        return Value(self._builder, self._builder.fpext(self.ir, to))

    def narrow(self, element: ir.Type) -> Value:
        """f32 rounded to the nearest f16, ties to even."""
        count = getattr(self.type, "count", None)
        to = element if count is None else vector(element, count)
        return Value(self._builder, self._builder.fptrunc(self.ir, to))

    def rounded_to_bf16(self) -> Value:
        """f32 rounded to the nearest number that bf16 holds, ties to even."""
        # by the bits: LLVM would call a function that is not there on older processors
        count = getattr(self.type, "count", None)
        bits = self.bits(I32 if count is None else vector(I32, count))
        rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) & ~0xFFFF).bits(self.type)
        is_number = self._builder.fcmp_ordered("ord", self.ir, self.ir)
        return Value(self._builder, self._builder.select(is_number, rounded.ir, self.ir))

    def rounded_to_f16(self) -> Value:
        """f32 rounded to the nearest number that f16 holds, ties to even, still as f32."""
        return self.narrow(F16).widen()

    def less(self, other: Value | float) -> Value:
        """Whether self < other, integers with their sign; false for NaN."""
        compare = "fcmp_ordered" if is_float(self.type) else "icmp_signed"
        return Value(
            self._builder, getattr(self._builder, compare)("<", self.ir, self._other(other))
        )

    def equal(self, other: Value | int) -> Value:
        """Whether integers are equal."""
        return Value(self._builder, self._builder.icmp_signed("==", self.ir, self._other(other)))


def transposed(rows: Sequence[Value]) -> list[Value]:
    """The columns of a matrix, one after the other in vectors of the rows' length.

    rows: a power of two of them.
    """
    result, half = list(rows), len(rows) // 2
    for _ in range(len(rows).bit_length() - 1):
        pairs = zip(result[:half], result[half:], strict=True)
        result = [part for a, b in pairs for part in a.interleaved(b)]
    return result


def constant(type: ir.Type, value: float | Sequence[float]) -> ir.Constant:
    if isinstance(type, ir.VectorType):
        return ir.Constant(type, [ir.Constant(type.element, value)] * type.count)
    return ir.Constant(type, value)


def mangled(type: ir.Type) -> str:
    short = {"float": "f32", "bfloat": "bf16", "half": "f16"}
    if isinstance(type, ir.VectorType):
        return f"v{type.count}{short.get(str(type.element), str(type.element))}"
    return short.get(str(type), str(type))
