// The maximum of a window, and the position of the first element equal to it. With NaN: NaN, and the position of the last one.
#pragma once
#include "common/common.cuh"

struct Maximum {
    T value = -(T)INFINITY;
    int32_t at = 0; // the first position of the window that is not in the padding

    // Elements in order.
    __device__ __forceinline__ void take(int position, T element) {
        if (element > value || element != element) value = element, at = position; // nothing is above NaN
    }
};
