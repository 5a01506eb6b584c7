// Offsets of the elements of a reduction in a C-contiguous array of shape (k0, r0, k1, r1, k2, r2, k3, r3), k kept and
// r reduced. An output has an index o in k0 k1 k2 k3, and an element of it an index r in r0 r1 r2 r3.
#pragma once
#include "common/common.cuh"

struct ReductionIndex {
    int64_t k0, r0, k1, r1, k2, r2, k3, r3;

    __device__ int64_t outputs() const { return k0 * k1 * k2 * k3; }
    __device__ int64_t count() const { return r0 * r1 * r2 * r3; }

    // The offset of the first element of output o. Division is several times faster in 32 bits than in 64.
    __device__ int64_t start(int64_t o) const {
        if (k0 * k1 * k2 == 1) return o * r3;
        return outputs() < (int64_t)1 << 31 ? start_of<uint32_t>((uint32_t)o) : start_of<int64_t>(o);
    }

    template <typename I> __device__ int64_t start_of(I o) const {
        int64_t step = r3, start = o % (I)k3 * step;
        o /= (I)k3, step *= k3 * r2, start += o % (I)k2 * step;
        o /= (I)k2, step *= k2 * r1, start += o % (I)k1 * step;
        o /= (I)k1, step *= k1 * r0, start += o * step;
        return start;
    }

    // Whether the reduced elements of an output have one stride, and that stride.
    __device__ bool uniform() const { return r0 * r1 * r2 == 1 || r0 * r1 * r3 == 1; }
    __device__ int64_t stride() const { return r0 * r1 * r2 == 1 ? 1 : k3; }

    // The offset of element r from the output's first element.
    __device__ int64_t offset(int64_t r) const {
        if (uniform()) return r * stride();
        if (count() < (int64_t)1 << 31) // division is several times faster in 32 bits
            return Steps<uint32_t, false>(*this, r, 0).at;
        return Steps<int64_t, false>(*this, r, 0).at;
    }

    // The offsets of elements begin, begin + step, ... without divisions: a step is added in the mixed radix r0 r1 r2
    // r3, with carries. PLANES: r0 and r1 are 1.
    template <typename I, bool PLANES> struct Steps {
        I i3, i2, i1, d3, d2, d1, r3, r2, r1;
        int64_t at, along, carry3, carry2, carry1;

        __device__ __forceinline__ Steps(const ReductionIndex &w, int64_t begin, int64_t step)
            : r3(w.r3), r2(w.r2), r1(w.r1) {
            const int64_t step2 = w.k3 * w.r3, step1 = step2 * w.r2 * w.k2, step0 = step1 * w.r1 * w.k1;
            auto split = [&](I r, I &a3, I &a2, I &a1) {
                I rest = r / r3;
                a3 = r - rest * r3, a2 = rest, a1 = 0;
                if (PLANES) return a3 + (int64_t)a2 * step2;
                a2 = rest % r2, rest /= r2, a1 = rest % r1, rest /= r1;
                return a3 + (int64_t)a2 * step2 + (int64_t)a1 * step1 + (int64_t)rest * step0;
            };
            at = split((I)begin, i3, i2, i1);
            along = split((I)step, d3, d2, d1);
            carry3 = step2 - w.r3, carry2 = step1 - w.r2 * step2, carry1 = step0 - w.r1 * step1;
        }
        __device__ __forceinline__ int64_t next() {
            const int64_t here = at;
            at += along, i3 += d3;
            const bool over3 = i3 >= r3;
            if (over3) i3 -= r3, at += carry3;
            if (PLANES) return here;
            i2 += d2 + over3;
            const bool over2 = i2 >= r2;
            if (over2) i2 -= r2, at += carry2;
            i1 += d1 + over2;
            if (i1 >= r1) i1 -= r1, at += carry1;
            return here;
        }
    };
};

struct UniformSteps {
    int64_t at, along;

    __device__ __forceinline__ int64_t next() {
        const int64_t here = at;
        at += along;
        return here;
    }
};
