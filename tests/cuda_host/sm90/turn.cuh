// kernels/cuda/sm90/turn.cuh on the CPU: see host.h.
#pragma once
#include "common/common.cuh"

static void wait_for_turn(const int *counter, int number) {
    while (*counter != number) leave();
}
static void pass_turn(int *counter) { ++*counter; }
