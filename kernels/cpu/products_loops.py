"""The loops of softmax, vector product and unary lookup on the CPU, compiled by numba when this file is imported.

All arrays contiguous; values, gradients and results flat fp32, letters as in ../jagged/softmax.py,
vector_product.py and unary_embeddings.py there. A loop does bags [low, high) and looks at their offsets, and at
ids, before it follows them: it returns -1, or the first bag or position that is wrong. Loops release the GIL and never
raise. Sums are added in the order that is written here.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import float32, int32, int64, uint64

from .njit import compiled, f4, i8

F1, I1 = float32[::1], int64[::1]

_F: Any = float32
LOG2_E = _F(1.4426950408889634)
LN2_HIGH, LN2_LOW = _F(0.693359375), _F(-2.12194440e-4)
# of exp(x) all that fp32 holds in full lies above
SMALLEST = _F(-87.33654)
ROUND = _F(12582912.0)  # 1.5 * 2**23: what is added to it is rounded to an integer
INFINITE = _F(np.inf)


@compiled(inline=True)
def _exp(x: Any) -> Any:
    """exp of x <= 0, to 2 units in the last place; 0 below the smallest normal number; of NaN NaN.

    The degree-5 polynomial of Cephes' expf after taking out the multiple of ln 2. No branch, so that it vectorises.
    """
    t = max(x, SMALLEST)
    rounded = t * LOG2_E + ROUND
    n = rounded - ROUND
    r = (t - n * LN2_HIGH) - n * LN2_LOW
    p = _F(1.9875691500e-4)
    p = p * r + _F(1.3981999507e-3)
    p = p * r + _F(8.3334519073e-3)
    p = p * r + _F(4.1665795894e-2)
    p = p * r + _F(1.6666665459e-1)
    p = p * r + _F(5.0000001201e-1)
    p = p * r * r + r + _F(1.0)
    power = np.int32((int32(n) + int32(127)) << int32(23)).view(np.float32)
    y = p * power
    y = _F(0.0) if x < SMALLEST else y
    return x if x != x else y


@compiled(inline=True)
def _in_order(O: Any, low: int, high: int, rows: int) -> Any:
    """-1, or the first bag of these that does not lie within the rows."""
    for b in range(low, high):
        if O[b] < 0 or O[b + 1] < O[b] or O[b + 1] > rows:
            return b
    return -1


@compiled(int64(F1, I1, F1, int64, int64, int64, int64, int64))
def softmax(X: Any, O: Any, Y: Any, rows: int, D: int, limit: int, low: int, high: int) -> Any:
    bad = _in_order(O, low, high, rows)
    if bad >= 0:
        return bad
    top, total = np.empty(D, np.float32), np.empty(D, np.float32)
    for b in range(low, high):
        begin, end = O[b], O[b + 1]
        stop = min(end, begin + limit)
        if stop > begin:
            for d in range(D):
                top[d] = X[begin * D + d]
                total[d] = _F(0.0)
        for i in range(begin + 1, stop):
            x = X[i * D : (i + 1) * D]
            for d in range(D):
                top[d] = max(top[d], x[d])
        for d in range(D):
            # of a column of nothing but -inf 0 / 0 is left, as torch has it
            top[d] = _F(0.0) if top[d] == -INFINITE else top[d]
        for i in range(begin, stop):
            x, y = X[i * D : (i + 1) * D], Y[i * D : (i + 1) * D]
            for d in range(D):
                y[d] = _exp(x[d] - top[d])
            for d in range(D):
                total[d] += y[d]
        for d in range(D):
            top[d] = _F(1.0) / total[d]
        for i in range(begin, stop):
            y = Y[i * D : (i + 1) * D]
            for d in range(D):
                y[d] = y[d] * top[d]
        for i in range(stop * D, end * D):
            Y[i] = _F(0.0)
    return -1


@compiled(int64(F1, F1, I1, F1, int64, int64, int64, int64, int64))
def softmax_gradient(G: Any, Y: Any, O: Any, Q: Any, rows: int, D: int, limit: int, low: int, high: int) -> Any:
    bad = _in_order(O, low, high, rows)
    if bad >= 0:
        return bad
    total = np.empty(D, np.float32)
    for b in range(low, high):
        begin, end = O[b], O[b + 1]
        stop = min(end, begin + limit)
        for d in range(D):
            total[d] = _F(0.0)
        for i in range(begin, stop):
            g, y = G[i * D : (i + 1) * D], Y[i * D : (i + 1) * D]
            for d in range(D):
                total[d] += g[d] * y[d]
        for i in range(begin, stop):
            g, y, q = G[i * D : (i + 1) * D], Y[i * D : (i + 1) * D], Q[i * D : (i + 1) * D]
            for d in range(D):
                q[d] = y[d] * (g[d] - total[d])
        for i in range(stop * D, end * D):
            Q[i] = _F(0.0)
    return -1


@compiled(int64(F1, F1, I1, F1, int64, int64, int64, int64, int64, int64))
def vector_product(V: Any, A: Any, O: Any, Y: Any, rows: int, H: int, L: int, D: int, low: int, high: int) -> Any:
    bad = _in_order(O, low, high, rows)
    if bad >= 0:
        return bad
    C = H * D
    for b in range(low, high):
        y = Y[b * C : (b + 1) * C]
        for c in range(C):
            y[c] = _F(0.0)
        for l in range(min(O[b + 1] - O[b], L)):
            i = (O[b] + l) * C
            for h in range(H):
                v = V[(b * H + h) * L + l]
                a, out = A[i + h * D : i + (h + 1) * D], y[h * D : (h + 1) * D]
                for d in range(D):
                    out[d] += v * a[d]
    return -1


@compiled(int64(F1, F1, I1, F1, int64, int64, int64, int64, int64, int64))
def vector_product_by_rows(
    G: Any, V: Any, O: Any, Q: Any, rows: int, H: int, L: int, D: int, low: int, high: int
) -> Any:
    bad = _in_order(O, low, high, rows)
    if bad >= 0:
        return bad
    C = H * D
    for b in range(low, high):
        stop = min(O[b + 1] - O[b], L)
        for l in range(stop):
            i = (O[b] + l) * C
            for h in range(H):
                v, j = V[(b * H + h) * L + l], (b * H + h) * D
                q, g = Q[i + h * D : i + (h + 1) * D], G[j : j + D]
                for d in range(D):
                    q[d] = v * g[d]
        for c in range((O[b] + stop) * C, O[b + 1] * C):
            Q[c] = _F(0.0)
    return -1


@compiled(int64(F1, F1, I1, F1, int64, int64, int64, int64, int64, int64))
def vector_product_by_vectors(
    G: Any, A: Any, O: Any, Q: Any, rows: int, H: int, L: int, D: int, low: int, high: int
) -> Any:
    bad = _in_order(O, low, high, rows)
    if bad >= 0:
        return bad
    C, whole = H * D, D // 8 * 8
    for b in range(low, high):
        stop = min(O[b + 1] - O[b], L)
        for h in range(H):
            q = Q[(b * H + h) * L : (b * H + h + 1) * L]
            g = G[(b * H + h) * D : (b * H + h + 1) * D]
            for l in range(stop):
                i = (O[b] + l) * C + h * D
                a = A[i : i + D]
                # eight sums, one for every eighth column: one alone would wait for each addition
                s0 = s1 = s2 = s3 = s4 = s5 = s6 = s7 = _F(0.0)
                for d in range(0, whole, 8):
                    s0 += a[d] * g[d]
                    s1 += a[d + 1] * g[d + 1]
                    s2 += a[d + 2] * g[d + 2]
                    s3 += a[d + 3] * g[d + 3]
                    s4 += a[d + 4] * g[d + 4]
                    s5 += a[d + 5] * g[d + 5]
                    s6 += a[d + 6] * g[d + 6]
                    s7 += a[d + 7] * g[d + 7]
                for d in range(whole, D):
                    s0 += a[d] * g[d]
                q[l] = ((s0 + s4) + (s2 + s6)) + ((s1 + s5) + (s3 + s7))
            for l in range(stop, L):
                q[l] = _F(0.0)
    return -1


@compiled(inline=True)
def _first_bad(TO: Any, O: Any, I: Any, S: int, B: int, t: int) -> Any:
    """-1, or 0 where table t, its bags or one of its ids lie outside of what they name."""
    if (t == 0 and O[0] != 0) or TO[t] < 0 or TO[t + 1] < TO[t] or TO[t + 1] > S:
        return 0
    if _in_order(O, t * B, (t + 1) * B, len(I)) >= 0:
        return 0
    beyond, last = int64(0), TO[t + 1] - TO[t] - 1
    # no branch, so that it vectorises
    for i in range(uint64(O[t * B]), uint64(O[(t + 1) * B])):
        beyond |= I[i] | (last - I[i])
    return 0 if beyond < 0 else -1


@compiled(int64(*[int64] * 12))
def unary_lookup(
    weight: int,
    tables: int,
    offsets: int,
    ids: int,
    out: int,
    T: int,
    N: int,
    tasks: int,
    S: int,
    B: int,
    low: int,
    high: int,
) -> Any:
    """Of tables [low, high); tensors as addresses, which cost a small batch less than arrays do."""
    TO, O, I = i8(tables, T + 1), i8(offsets, T * B + 1), i8(ids, N)
    W, Y = f4(weight, tasks * S), f4(out, tasks * B * T)
    # what is counted without a sign is not looked at for whether it counts from the end
    step, each = uint64(S), uint64(B * T)
    for t in range(low, high):
        bad = _first_bad(TO, O, I, S, B, t)
        if bad >= 0:
            return bad
        for n in range(0, tasks, 2):
            # two tasks at a time: ends of bags are what a core guesses wrong
            two, w = n + 1 < tasks, uint64(n * S + TO[t])
            y = uint64(n * B * T + t)
            for b in range(t * B, (t + 1) * B):
                first = second = _F(0.0)
                if two:
                    for i in range(uint64(O[b]), uint64(O[b + 1])):
                        at = w + uint64(I[i])
                        first += W[at]
                        second += W[at + step]
                    Y[y + each] = second
                else:
                    for i in range(uint64(O[b]), uint64(O[b + 1])):
                        first += W[w + uint64(I[i])]
                Y[y] = first
                y += uint64(T)
    return -1


@compiled(int64(F1, I1, I1, I1, F1, int64, int64, int64, int64, int64))
def unary_gradient(G: Any, TO: Any, O: Any, I: Any, Q: Any, tasks: int, S: int, B: int, low: int, high: int) -> Any:
    """Of tables [low, high), which own their rows of Q."""
    T = len(TO) - 1
    for t in range(low, high):
        bad = _first_bad(TO, O, I, S, B, t)
        if bad >= 0:
            return bad
        for n in range(tasks):
            q, g = Q[n * S + TO[t] : n * S + TO[t + 1]], G[n * B * T : (n + 1) * B * T]
            for b in range(B):
                upstream = g[b * T + t]
                for i in range(O[t * B + b], O[t * B + b + 1]):
                    q[I[i]] += upstream
    return -1
