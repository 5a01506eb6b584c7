// The maximum of a window and the position of the first maximum. With NaN: NaN and the position of the last NaN.
#pragma once
#include "common/common.cuh"

struct Maximum {
    T value = -(T)INFINITY;
    int32_t at = 0; // initially the first position of the window that is not in the padding

    // Elements are taken in order.
    __device__ __forceinline__ void take(int position, T element) {
        if (element > value || element != element) value = element, at = position; // no number is greater than NaN
    }
};
