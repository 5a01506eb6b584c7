// Asynchronous copies from global to shared memory, of compute capability 8.0 and newer.

__device__ inline void copy_16_bytes(float *shared, const float *global) {
    unsigned target = __cvta_generic_to_shared(shared);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(target), "l"(global));
}

// The copies since the last call become a group.
__device__ inline void end_group() { asm volatile("cp.async.commit_group;"); }

// Wait until all groups of this thread but the last `LATEST` have arrived.
template <int LATEST> __device__ inline void wait_for_groups() {
    asm volatile("cp.async.wait_group %0;" ::"n"(LATEST) : "memory");
}
