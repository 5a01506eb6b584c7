// The maximum of a window and where it is: the first element that is equal to it; of a NaN the last one of the window.
#pragma once
#include "common/common.cuh"

struct Maximum {
    T value;
    int32_t at;
    bool nan = false;

    // Of elements in their order, from 0 on.
    __device__ __forceinline__ void take(int place, T element) {
        nan = nan || element != element;
        if (place == 0 || element > value) value = element, at = place;
    }
    __device__ __forceinline__ void end(int last) {
        if (nan) value = (T)NAN, at = last;
    }
};
