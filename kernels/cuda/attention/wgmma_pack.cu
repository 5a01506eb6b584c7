// Packs q, k and v in bfloat16: see wgmma_pack.cuh. blockIdx.y numbers the arrays.
#include "attention/wgmma_pack.cuh"
#include "attention/wgmma_scratch.cuh"

KERNEL attention_pack(const S *q, const S *k, const S *v, int64_t batch, int64_t heads, int64_t queries, int64_t keys,
    int64_t row, int64_t step, char *scratch) {
    wait_for_inputs();
    const Inputs packed(scratch, batch, queries, keys);
    if (blockIdx.y == 0)
        pack_array(q, batch, heads, queries, row, packed.q);
    else if (blockIdx.y == 1)
        pack_array(k + step, batch, heads, keys, row, packed.k);
    else
        pack_array(v + 2 * step, batch, heads, keys, row, packed.v);
}
