"""How weights and rows of x lie before many are multiplied with many.

A stretch of 256 neighbouring numbers of a row, with all that its products need, is a record of
words of 4 bytes. Records of some weight rows, or of some rows of x, are transposed: word after
word, each of all the rows side by side.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TypeVar

from kernels.linear.block_parts import MOST, is_long
from kernels.linear.integer_blocks.activations_with_llvm import FORMS, PER_STRETCH, STRETCH
from kernels.linear.packed import BYTE_ZERO
from kernels.llvm import Value

Length = TypeVar("Length", int, Value)

WORD = 4
HALVES = range(2)
"""The vectors of a word of all the weight rows."""
# width and height by the bits of vnni: of AVX2's registers there are 16, of AVX512's 32
_SHAPES = {0: (8, 4), 256: (8, 4), 512: (16, 8)}
# of products of bytes pairs are added in 16 bits
_MOST_SUM, _PAIR = 2**15 - 1, 2


@dataclass(frozen=True, slots=True)
class Panel:
    """Records of one GGML type; offsets count words.

    A record of a weight row has integers, four bytes in a word, or in one word the first and the
    third of four as 16 bits, and in the word PER_STRETCH after it the others, in lines of
    PER_STRETCH lanes (kernels.linear.integer_blocks.activations_with_llvm.Layout); in long blocks
    scales of groups, each as a pair of 16 bits or, with vnni, as 32 bits, and minimums of groups
    in such pairs; in short ones, where a block has two groups, their scales f32; scales and
    minimums f32, one of a long block, PER_STRETCH of short ones.
    A record of a row of x has integers; scales f32; and what minimums are multiplied with, sums of
    16 bits, or f32 in short blocks.

    lanes: of Layout. groups: parts of a stretch with a scale of their own. signed: weights have a
    sign. together: pairs of products of bytes that are summed in 16 bits; 0 where these do not hold
    even one, so that integers have 16 bits, those of weights multiplied with their group's scale.
    vnni: bytes are summed in 32 bits. width: words in a vector. tall: rows of x that are multiplied
    together; with two vectors of weight rows each, their sums fill the registers.
    """

    long: bool
    lanes: tuple[int, ...]
    groups: int
    minimums: bool
    signed: bool
    together: int
    vnni: bool
    width: int
    tall: int

    @property
    def outputs(self) -> int:
        """Weight rows in a panel."""
        return self.width * len(HALVES)

    @property
    def vector_bytes(self) -> int:
        return WORD * self.width

    @property
    def line(self) -> int:
        """Bytes of a word of all the weight rows."""
        return WORD * self.outputs

    @property
    def row_line(self) -> int:
        """Bytes of a word of all the rows of x that are together."""
        return WORD * self.tall

    @property
    def tile_bytes(self) -> int:
        """Bytes of a record of rows of x."""
        return self.row_line * self.row_words

    @property
    def sides(self) -> int:
        """Eights of lanes; of a short block as many groups."""
        return len(self.lanes) // PER_STRETCH

    @property
    def words(self) -> bool:
        return not self.vnni and not self.together

    @property
    def starts(self) -> bool:
        """Sums begin with what BYTE_ZERO adds to them, negated."""
        return self.signed and not self.words

    @property
    def integers(self) -> int:
        return STRETCH * (2 if self.words else 1) // WORD

    @property
    def group_order(self) -> list[int]:
        """Groups in the order of their first lanes."""
        per_side = self.groups // self.sides
        starts = range(0, len(self.lanes), PER_STRETCH)
        first = [lane for start in starts for lane in self.lanes[start : start + per_side]]
        return [lane * self.groups // len(self.lanes) for lane in first]

    def words_of_group(self, place: Length) -> list[Length]:
        """The words of integers of the group at a place of group_order."""
        per_side, side_words = self.groups // self.sides, self.integers // self.sides
        first = place % per_side + place // per_side * side_words
        lines = range(0, side_words, PER_STRETCH)
        lanes = range(0, PER_STRETCH, per_side)
        return [first + (line + lane) for line in lines for lane in lanes]

    @property
    def group_scales(self) -> int:
        return self.integers

    @property
    def group_minimums(self) -> int:
        has_scales = not self.words if self.long else self.sides > 1
        return self.group_scales + (self.groups if has_scales else 0)

    @property
    def scales(self) -> int:
        return self.group_minimums + (PER_STRETCH if self.long and self.minimums else 0)

    @property
    def scale_minimums(self) -> int:
        return self.scales + (1 if self.long else PER_STRETCH)

    @property
    def weight_words(self) -> int:
        """Words of a weight row's record: of whole vectors of four."""
        end = self.scale_minimums + (self.scale_minimums - self.scales if self.minimums else 0)
        return end + -end % 4

    @property
    def row_scales(self) -> int:
        return self.integers

    @property
    def row_sums(self) -> int:
        return self.row_scales + (1 if self.long else PER_STRETCH)

    @property
    def row_words(self) -> int:
        """Words of the record of a row of x."""
        return self.row_sums + (PER_STRETCH if self.minimums else 0)


@functools.cache
def panel(type: str, *, vnni: int) -> Panel:
    """vnni: see kernels.processor.vnni_bits."""
    form = FORMS[type]
    groups = STRETCH // form.group if form.group else PER_STRETCH
    signed = form.most is None or form.offset > 0
    most = 2**7 if form.most is None else max(form.offset, form.most - form.offset)
    together = _MOST_SUM // (_PAIR * most * (MOST + (BYTE_ZERO if signed else 0)))
    width, tall = _SHAPES[vnni]
    return Panel(
        is_long(type),
        form.lanes,
        groups,
        form.minimum,
        signed,
        _power_of_2(together),
        vnni > 0,
        width,
        tall,
    )


def _power_of_2(n: int) -> int:
    """The largest one that is not above n, 0 for 0."""
    return 1 << n.bit_length() - 1 if n else 0
