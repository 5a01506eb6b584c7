// The state of a reduction, for each OPERATION: 0 sum, 1 max, 2 min, 3 argmax (the first maximum), 4 logsumexp. take()
// adds elements r, r + step, ...; Merge::of combines two states; result() gives the output. T is the type of elements,
// U that of results.
#pragma once
#ifndef OPERATION
#define OPERATION 0
#endif
#include "common/collectives.cuh"

#if OPERATION <= 2

#if OPERATION == 0
typedef Sum Op;
#elif OPERATION == 1
typedef Max Op;
#else
typedef Min Op;
#endif

struct State {
    U value;

    static __device__ __forceinline__ State empty() { return {Op::identity<U>()}; }
    template <int W> __device__ __forceinline__ void take(const T (&v)[W], int64_t, int64_t = 1) {
        if constexpr (sizeof(T) == 1 && W % 4 == 0 && OPERATION == 0) { // four bytes at a time, summed in 32 bits
            constexpr bool SIGNED = (T)-1 < (T)0;
            int sum = 0;
            #pragma unroll
            for (int k = 0; k < W; k += 4) {
                uint32_t four;
                memcpy(&four, &v[k], 4);
                sum = SIGNED ? __dp4a((int)four, 0x01010101, sum) : (int)__dp4a(four, 0x01010101u, (uint32_t)sum);
            }
            value += sum;
        } else {
            #pragma unroll
            for (int k = 0; k < W; k++) value = Op::of(value, (U)v[k]);
        }
    }
    __device__ __forceinline__ U result() const { return value; }
};

static __device__ __forceinline__ State shuffle_xor(const State &s, int mask) { return {shuffle_xor(s.value, mask)}; }

struct Merge {
    static __device__ __forceinline__ State of(const State &a, const State &b) { return {Op::of(a.value, b.value)}; }
};

#elif OPERATION == 3

// NaN is larger than every number, as in NumPy.
struct State {
    T value;
    int64_t at;

    // No element so far. Elements equal to the lowest value are not taken; if none is taken, the result is 0.
    static constexpr int64_t NONE = ~0ull >> 1;

    static __device__ __forceinline__ State empty() { return {lowest<T>(), NONE}; }
    template <int W> __device__ __forceinline__ void take(const T (&v)[W], int64_t r, int64_t step = 1) {
        T top = v[0];
        #pragma unroll
        for (int k = 1; k < W; k++) top = Max::of(top, v[k]);
        if (top <= value || value != value)
            return; // positions ascend, and the first of equal elements counts
        int first = W - 1;
        #pragma unroll
        for (int k = W - 2; k >= 0; k--)
            if (v[k] == top || v[k] != v[k]) first = k;
        value = top;
        at = r + first * step;
    }
    __device__ __forceinline__ void join(const State &other) {
        const bool larger = !(other.value <= value) && value == value;
        const bool equal = other.value == value || (other.value != other.value && value != value);
        if (larger || (equal && other.at < at)) *this = other;
    }
    __device__ __forceinline__ int64_t result() const { return at == NONE ? 0 : at; }
};

static __device__ __forceinline__ State shuffle_xor(const State &s, int mask) {
    return {shuffle_xor(s.value, mask), shuffle_xor(s.at, mask)};
}

struct Merge {
    static __device__ __forceinline__ State of(State a, const State &b) {
        a.join(b);
        return a;
    }
};

#else

// sum exp(x) is total * exp(top). If top is not finite, top is the result, whatever total is.
struct State {
    T top, total;

    static __device__ __forceinline__ State empty() { return {lowest<T>(), 0}; }
    // The number to subtract from exponents: top, or 0 if top is infinite, because a difference of infinities is NaN.
    static __device__ __forceinline__ T origin(T top) { return isfinite(top) ? top : (T)0; }
    template <int W> __device__ __forceinline__ void take(const T (&v)[W], int64_t, int64_t = 1) {
        T largest = v[0];
        #pragma unroll
        for (int k = 1; k < W; k++) largest = Max::of(largest, v[k]);
        const T above = Max::of(top, largest), from = origin(above);
        total *= exp(top - from);
        top = above;
        #pragma unroll
        for (int k = 0; k < W; k++) total += exp(v[k] - from);
    }
    __device__ __forceinline__ T result() const { return isfinite(top) ? log(total) + top : top; }
};

static __device__ __forceinline__ State shuffle_xor(const State &s, int mask) {
    return {shuffle_xor(s.top, mask), shuffle_xor(s.total, mask)};
}

struct Merge {
    static __device__ __forceinline__ State of(const State &a, const State &b) {
        const T top = Max::of(a.top, b.top), from = State::origin(top);
        return {top, a.total * exp(a.top - from) + b.total * exp(b.top - from)};
    }
};

#endif

// The combined state of COUNT neighbouring lanes, in each of them.
template <int COUNT> static __device__ __forceinline__ State combine_lanes(const State &s) {
#if OPERATION == 4 // one exp per shuffle instead of two
    const T top = over_lanes<Max, COUNT>(s.top);
    return {top, over_lanes<Sum, COUNT>(s.total * exp(s.top - State::origin(top)))};
#else
    return over_lanes<Merge, COUNT>(s);
#endif
}

// Loads a vector of bytes as words: take() needs words, and would assemble them from bytes.
template <int N> static __device__ __forceinline__ Vector<T, N> load_words(const T *from) {
    if constexpr (sizeof(T) == 1 && N % 4 == 0) {
        const Vector<uint32_t, N / 4> words = load<uint32_t, N / 4>(reinterpret_cast<const uint32_t *>(from));
        Vector<T, N> v;
        memcpy(&v, &words, N);
        return v;
    } else
        return load<T, N>(from);
}

// The argument of a reduction: a pointer to its elements, or with COMPUTED_ARGUMENT the generated struct of that name
// (forms/reduction.py), whose vector<N>(i) computes elements i, i + 1, ... i + N - 1. A Place is a pointer to such an element.
// Vectors of 16 bytes begin at multiples of their length.
#ifdef COMPUTED_ARGUMENT
typedef Elements Argument;

struct Place {
    Elements of;
    int64_t at;

    __device__ __forceinline__ Place operator+(int64_t n) const { return {of, at + n}; }
};

__device__ __forceinline__ Place operator+(const Elements &x, int64_t n) { return {x, n}; }

template <typename, int N> static __device__ __forceinline__ Vector<T, N> load(const Place &from) {
    return from.of.vector<N>(from.at);
}
template <int N> static __device__ __forceinline__ Vector<T, N> load_words(const Place &from) { return load<T, N>(from); }

// The elements before the next whole vector of `wide`.
static __device__ __forceinline__ int64_t before_vector(const Place &x, int wide) { return (wide - x.at % wide) % wide; }
#else
typedef const T *Argument;
#endif
static __device__ __forceinline__ int64_t before_vector(const T *x, int) {
    return (16 - (uintptr_t)x % 16) % 16 / sizeof(T);
}

// `threads` threads (at least a warp) take `count` contiguous elements, the first of index r; `thread` is this thread's number.
// Each loads 16 bytes at a time, with four loads in flight, into two states. The elements before and after the aligned vectors
// go to the first threads, one each.
template <typename Place>
static __device__ __forceinline__ void contiguous(Place x, int64_t count, int64_t r, int thread, int threads,
                                                  State &a, State &b) {
    constexpr int WIDE = 16 / sizeof(T), LOADS = 4;
    const int64_t head = min(count, before_vector(x, WIDE));
    const int64_t vectors = (count - head) / WIDE, tail = head + vectors * WIDE;
    const int64_t edge = thread < head ? thread : tail + thread - head;
    const Place body = x + head;
    Vector<T, 1> single;
    if (edge < count) single = load<T, 1>(x + edge);
    for (int64_t i = thread; i < vectors; i += LOADS * threads) {
        Vector<T, WIDE> v[LOADS];
        #pragma unroll
        for (int k = 0; k < LOADS; k++) // past the end, load the last one again: no branches between the loads
            v[k] = load_words<WIDE>(body + min(i + k * threads, vectors - 1) * WIDE);
        #pragma unroll
        for (int k = 0; k < LOADS; k++)
            if (i + k * threads < vectors) (k % 2 ? b : a).take(v[k].lane, r + head + (i + k * threads) * WIDE);
    }
    if (edge < count) {
        State edges = State::empty();
        edges.take(single.lane, r + edge);
        b = Merge::of(b, edges);
    }
}
