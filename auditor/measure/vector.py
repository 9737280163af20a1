"""Operations on 64 elements at once, for the kernels of ``text``, ``sketch`` and ``repetition``.

Each is written in LLVM's vector types, which the compiler turns into what the processor has (a few
instructions with AVX2 or AVX-512, more without), and is bit-identical everywhere. A mask is a u64
in which bit k speaks of element k. All of them read or write 64 elements from the given index on
whatever follows: the caller keeps ``PADDING`` elements behind what counts, and clears their bits.
"""

from __future__ import annotations

from typing import Any, Final

from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

PADDING: Final = 64
"""Elements that must exist behind the last one an operation starts at."""

LANES: Final = 32
"""Permutations that ``lowest_lanes`` takes at once."""

_BYTE = ir.IntType(8)
_HALF = ir.IntType(32)
_WORD = ir.IntType(64)
_BLOCK = ir.VectorType(_BYTE, 64)


def _address(context: Any, builder: Any, kind: Any, array: Any, index: Any, pointee: Any) -> Any:
    base = context.make_array(kind)(context, builder, array).data
    return builder.bitcast(builder.gep(base, [index]), pointee.as_pointer())


def _all(value: int) -> Any:
    return ir.Constant(_BLOCK, [value & 0xFF] * 64)


def _splat(builder: Any, value: Any, kind: Any) -> Any:
    """A vector with one value in every lane."""
    empty = ir.Constant(kind, ir.Undefined)
    one = builder.insert_element(empty, value, ir.Constant(_HALF, 0))
    zeros = ir.Constant(ir.VectorType(_HALF, kind.count), [0] * kind.count)
    return builder.shuffle_vector(one, empty, zeros)


def _within(builder: Any, block: Any, low: int, count: int) -> Any:
    """Bytes of low .. low + count - 1, as <64 x i1>."""
    return builder.icmp_unsigned("<", builder.sub(block, _all(low)), _all(count))


@intrinsic
def load_u64(typingctx, array, index):  # type: ignore[no-untyped-def]
    """Eight bytes of a u8 array from ``index`` on, as one little-endian u64, wherever it lies."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        array, index = arguments
        address = _address(context, builder, signature.args[0], array, index, _WORD)
        return builder.load(address, align=1)

    return types.uint64(array, types.int64), generate


@intrinsic
def trailing_zeros(typingctx, mask):  # type: ignore[no-untyped-def]
    """Position of the lowest set bit of a u64 other than 0, i64."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        return builder.cttz(arguments[0], cgutils.true_bit)

    return types.int64(types.uint64), generate


@intrinsic
def count_ones(typingctx, mask):  # type: ignore[no-untyped-def]
    """Set bits of a u64, i64."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        return builder.ctpop(arguments[0])

    return types.int64(types.uint64), generate


@intrinsic
def lower_block(typingctx, source, i, target, o):  # type: ignore[no-untyped-def]
    """Write source[i : i + 64] in ASCII lower case to target[o : o + 64], both u8.

    Returns the masks of bytes that are not ASCII, of word characters (ASCII ``\\w``) and of
    whitespace (ASCII ``str.isspace``).
    """

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        source, i, target, o = arguments
        kind = signature.args[0]
        read = _address(context, builder, kind, source, i, _BLOCK)
        block = builder.load(read, align=1)
        upper = _within(builder, block, ord("A"), 26)
        case = builder.select(upper, _all(0x20), _all(0))
        block = builder.or_(block, case)
        write = _address(context, builder, signature.args[2], target, o, _BLOCK)
        builder.store(block, write, align=1)
        high = builder.icmp_signed("<", block, _all(0))
        word = builder.or_(
            builder.or_(_within(builder, block, ord("a"), 26), _within(builder, block, 48, 10)),
            builder.icmp_unsigned("==", block, _all(ord("_"))),
        )
        space = builder.or_(_within(builder, block, 9, 5), _within(builder, block, 28, 5))
        masks = [builder.bitcast(mask, _WORD) for mask in (high, word, space)]
        return context.make_tuple(builder, signature.return_type, masks)

    triple = types.UniTuple(types.uint64, 3)
    return triple(source, types.int64, target, types.int64), generate


@intrinsic
def not_ascii(typingctx, source, i):  # type: ignore[no-untyped-def]
    """The mask of bytes of source[i : i + 64], u8, that are not ASCII."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        source, i = arguments
        read = _address(context, builder, signature.args[0], source, i, _BLOCK)
        block = builder.load(read, align=1)
        return builder.bitcast(builder.icmp_signed("<", block, _all(0)), _WORD)

    return types.uint64(source, types.int64), generate


@intrinsic
def blank_block(typingctx, source, i, space, target, o):  # type: ignore[no-untyped-def]
    """Write source[i : i + 64] to target[o : o + 64], both u8, blanks where ``space`` has bits."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        source, i, space, target, o = arguments
        read = _address(context, builder, signature.args[0], source, i, _BLOCK)
        write = _address(context, builder, signature.args[3], target, o, _BLOCK)
        mask = builder.bitcast(space, ir.VectorType(ir.IntType(1), 64))
        block = builder.select(mask, _all(0x20), builder.load(read, align=1))
        builder.store(block, write, align=1)
        return context.get_dummy_value()

    return types.void(source, types.int64, types.uint64, target, types.int64), generate


@intrinsic
def equal_block(typingctx, values, i, j):  # type: ignore[no-untyped-def]
    """The mask of k for which values[i + k] == values[j + k], 8-byte integers."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        values, i, j = arguments
        block = ir.VectorType(_WORD, 64)
        kind = signature.args[0]
        one = builder.load(_address(context, builder, kind, values, i, block), align=1)
        two = builder.load(_address(context, builder, kind, values, j, block), align=1)
        return builder.bitcast(builder.icmp_unsigned("==", one, two), _WORD)

    return types.uint64(values, types.int64, types.int64), generate


@intrinsic
def widen_block(typingctx, source, i, target, o):  # type: ignore[no-untyped-def]
    """Write source[i : i + 64], u8, as numbers to target[o : o + 64], u64."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        source, i, target, o = arguments
        wide = ir.VectorType(_WORD, 64)
        read = _address(context, builder, signature.args[0], source, i, _BLOCK)
        write = _address(context, builder, signature.args[2], target, o, wide)
        builder.store(builder.zext(builder.load(read, align=1), wide), write, align=1)
        return context.get_dummy_value()

    return types.void(source, types.int64, target, types.int64), generate


@intrinsic
def shingle_block(typingctx, elements, s, tag, flip, target, o):  # type: ignore[no-untyped-def]
    """Hashes for MinHash of the 64 shingles of elements[s : s + 68], u64, to target[o : o + 64].

    The upper half of ``tag ^ e[0] ^ turn(e[1], 13) ^ ... ^ turn(e[4], 52)``, exclusive-or'ed with
    ``flip`` u32 and put through MurmurHash3's 32-bit finaliser, u32; ``turn`` rotates to the left.
    """

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        elements, s, tag, flip, target, o = arguments
        width = 16  # so that the intermediate values stay in registers
        wide, narrow = ir.VectorType(_WORD, width), ir.VectorType(_HALF, width)
        tags = _splat(builder, tag, wide)
        flips = _splat(builder, flip, narrow)
        for part in range(0, 64, width):
            total = tags
            for place in range(5):
                at = builder.add(s, ir.Constant(_WORD, part + place))
                read = _address(context, builder, signature.args[0], elements, at, wide)
                element = builder.load(read, align=8)
                if place:
                    element = builder.or_(
                        builder.shl(element, ir.Constant(wide, [13 * place] * width)),
                        builder.lshr(element, ir.Constant(wide, [64 - 13 * place] * width)),
                    )
                total = builder.xor(total, element)
            h = builder.trunc(builder.lshr(total, ir.Constant(wide, [32] * width)), narrow)
            h = builder.xor(h, flips)
            for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, None)):
                h = builder.xor(h, builder.lshr(h, ir.Constant(narrow, [shift] * width)))
                if factor is not None:
                    h = builder.mul(h, ir.Constant(narrow, [factor] * width))
            at = builder.add(o, ir.Constant(_WORD, part))
            write = _address(context, builder, signature.args[4], target, at, narrow)
            builder.store(h, write, align=4)
        return context.get_dummy_value()

    return types.void(
        elements, types.int64, types.uint64, types.uint32, target, types.int64
    ), generate


@intrinsic
def lowest_lanes(typingctx, hashes, n, a, b, p, target):  # type: ignore[no-untyped-def]
    """target[p : p + LANES] = its minimum with ``a * h + b mod 2^32`` over h in hashes[:n], u32.

    The lanes are permutations: factors, terms and minima stay in registers over all hashes.
    """

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        hashes, n, a, b, p, target = arguments
        lanes = ir.VectorType(_HALF, LANES)
        kinds = signature.args
        factors = builder.load(_address(context, builder, kinds[2], a, p, lanes), align=4)
        terms = builder.load(_address(context, builder, kinds[3], b, p, lanes), align=4)
        place = _address(context, builder, kinds[5], target, p, lanes)
        lowest = builder.load(place, align=4)
        before = builder.block
        loop, after = builder.append_basic_block("hashes"), builder.append_basic_block("done")
        builder.cbranch(builder.icmp_signed(">", n, ir.Constant(_WORD, 0)), loop, after)
        builder.position_at_end(loop)
        s = builder.phi(_WORD)
        s.add_incoming(ir.Constant(_WORD, 0), before)
        least = builder.phi(lanes)
        least.add_incoming(lowest, before)
        read = _address(context, builder, kinds[0], hashes, s, _HALF)
        h = _splat(builder, builder.load(read, align=4), lanes)
        value = builder.add(builder.mul(h, factors), terms)
        smaller = builder.select(builder.icmp_unsigned("<", value, least), value, least)
        following = builder.add(s, ir.Constant(_WORD, 1))
        s.add_incoming(following, loop)
        least.add_incoming(smaller, loop)
        builder.cbranch(builder.icmp_signed("<", following, n), loop, after)
        builder.position_at_end(after)
        result = builder.phi(lanes)
        result.add_incoming(lowest, before)
        result.add_incoming(smaller, loop)
        builder.store(result, place, align=4)
        return context.get_dummy_value()

    return types.void(hashes, types.int64, a, b, types.int64, target), generate
