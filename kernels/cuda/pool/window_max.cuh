// The maximum of a window and the position of the first element equal to it. With NaN: NaN, and the last position.
#pragma once
#include "common/common.cuh"

struct Maximum {
    T value;
    int32_t at;
    bool nan = false;

    // Elements in order, from position 0 on.
    __device__ __forceinline__ void take(int position, T element) {
        nan = nan || element != element;
        if (position == 0 || element > value) value = element, at = position;
    }
    __device__ __forceinline__ void end(int last) {
        if (nan) value = (T)NAN, at = last;
    }
};
