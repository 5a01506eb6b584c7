// The maximum of a window and its position: the first element equal to it; with NaN, NaN and the last position.
#pragma once
#include "common/common.cuh"

struct Maximum {
    T value;
    int32_t at;
    bool nan = false;

    // Elements in order, from position 0 on.
    __device__ __forceinline__ void take(int place, T element) {
        nan = nan || element != element;
        if (place == 0 || element > value) value = element, at = place;
    }
    __device__ __forceinline__ void end(int last) {
        if (nan) value = (T)NAN, at = last;
    }
};
