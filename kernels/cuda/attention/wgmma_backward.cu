// The kernel of the gradient of attention by WGMMA: see wgmma_backward.cuh.
#if OPERAND_TERMS == 2
#include "attention/wgmma_backward_fp16x2.cuh"
#else
#include "attention/wgmma_backward_bfloat16.cuh"
#endif

// by_k and by_v begin `step` and 2 step elements after their pointers.
KERNEL __launch_bounds__(THREADS, 1) attention_wgmma_grad(
    IF(DIRECT, const S *q, const S *k, const S *v, const S *ct, ) S *by_q, S *by_k, S *by_v, int64_t batch, int64_t heads,
    int64_t queries, int64_t keys, int64_t row, IF(DIRECT, int64_t out_row, ) int64_t step, double scale, char *scratch) {
    __shared__ Barriers barriers;
#if DIRECT // nothing before the wait reads memory
    __shared__ HeadMaps in_shared;
    const int warp = threadIdx.x / WARP;
    if (warp == 0) make_map<BLOCK_Q>(in_shared.q, q, batch, heads, queries, row);
    if (warp == 1) make_map<BLOCK_K>(in_shared.k, k + step, batch, heads, keys, row);
    if (warp == 2) make_map<BLOCK_K>(in_shared.v, v + 2 * step, batch, heads, keys, row);
    if (warp == 3) make_map<BLOCK_Q>(in_shared.ct, ct, batch, heads, queries, out_row);
#endif
    wait_for_inputs();
    if (threadIdx.x == 0) {
        barriers.k.init(1, CONSUMER_WARPS);
        barriers.v.init(1, CONSUMER_WARPS);
        barriers.q.init(1, CONSUMER_WARPS);
        barriers.ct.init(1, CONSUMER_WARPS);
        for (Mbarrier &full : barriers.by_q_full) full.init(CONSUMER_WARPS / BY_Q_BUFFERS);
        for (Mbarrier &empty : barriers.by_q_empty) empty.init(1);
        fence_mbarrier_init();
    }
    __syncthreads();
    const int tiles = batch * ((keys + BLOCK_K - 1) / BLOCK_K);
    const SharedTiles shared;
    if (uniform_warpgroup() == 0) {
        warpgroup_reg_dealloc<24>();
        const GradientScratch packed(scratch, batch, queries, keys);
#if DIRECT
        if (threadIdx.x < WARP) {
            const Arrays arrays(packed.maps(), in_shared, heads);
            if (threadIdx.x == 0) produce(arrays, packed, barriers, shared, tiles, batch, queries, keys);
        }
#else
        if (threadIdx.x == 0) produce(packed, packed, barriers, shared, tiles, batch, queries, keys);
#endif
        else if (threadIdx.x == WARP || threadIdx.x == 2 * WARP)
            add_by_q(packed, barriers, shared, tiles, batch, queries, keys, threadIdx.x / WARP - 1);
    } else {
        warpgroup_reg_alloc<240>();
        const GradientScratch packed(scratch, batch, queries, keys);
        consume(packed, barriers, shared, by_q, by_k + step, by_v + 2 * step, tiles, batch, heads, queries, keys, row,
            (float)scale * LOG2_E);
    }
}
