// Exchanges bytes between GPUs that have mapped each other's memory, by loads through NVLink or PCIe.
//
// Each rank has a window, which its peers have mapped: chunks, then flags and counters. A block has two buffers of one
// chunk for every rank, which it uses in turn. In a round, block b writes chunks to its own window and sets a flag in
// each peer's window. It waits for the flags of block b of all peers, and reads its chunks from their windows. It writes
// to a chunk again two rounds later. By then each peer has set its flag of the round between, and so has read the chunk.
//
// Block b waits for block b of the peers only, so not all blocks have to run at the same time.
//
// Macros (PeerMemory in peer_memory.py): RANKS. BLOCK_THREADS: threads of a block. BLOCKS: the most blocks of a grid. CHUNK: bytes
// of a chunk. FLAGS_AT: the offset of the flags in a window.
#include "common/common.cuh"

struct Windows {
    char *of[RANKS];
};

static __device__ void copy(char *to, const char *from, int64_t size)
{
    if ((((uintptr_t)to | (uintptr_t)from | (uintptr_t)size) & 15) == 0) {
        #pragma unroll 4
        for (int64_t i = threadIdx.x; i < size / 16; i += BLOCK_THREADS) ((uint4 *)to)[i] = ((const uint4 *)from)[i];
    } else {
        for (int64_t i = threadIdx.x; i < size; i += BLOCK_THREADS) to[i] = from[i];
    }
}

// The flag that rank `rank` sets in a window for this block.
static __device__ uint32_t *flag(char *window, int64_t rank)
{
    return (uint32_t *)(window + FLAGS_AT) + rank * BLOCKS + blockIdx.x;
}

// all_gather: item r of `received` is what rank r has sent. Otherwise (all-to-all) it is item `rank` of what rank r has sent.
// size: bytes of an item.
KERNEL peer_exchange(
    const char *sent, char *received, const Windows windows, int64_t rank, int64_t size, int64_t all_gather)
{
    char *own = windows.of[rank];
    uint32_t *counter = flag(own, rank); // of rounds; no peer sets this flag
    uint32_t round = *counter;
    for (int64_t start = (int64_t)blockIdx.x * CHUNK; start < size; start += (int64_t)gridDim.x * CHUNK) {
        const int64_t bytes = size - start < CHUNK ? size - start : CHUNK;
        round++;
        const int64_t chunks = ((round & 1) * BLOCKS + blockIdx.x) * (int64_t)RANKS * CHUNK;
        copy(received + rank * size + start, sent + (all_gather ? 0 : rank * size) + start, bytes);
        if (all_gather) copy(own + chunks, sent + start, bytes); // one chunk for all peers
        for (int peer = 0; peer < RANKS; peer++)
            if (peer != rank && !all_gather) copy(own + chunks + peer * CHUNK, sent + peer * size + start, bytes);
        __syncthreads();
        if (threadIdx.x < RANKS && threadIdx.x != rank) {
            asm volatile("fence.acq_rel.sys;" ::: "memory");
            uint32_t *theirs = flag(windows.of[threadIdx.x], rank), *mine = flag(own, threadIdx.x);
            asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(theirs), "r"(round) : "memory");
            uint32_t seen;
            do {
                asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(seen) : "l"(mine) : "memory");
            } while ((int32_t)(seen - round) < 0);
        }
        __syncthreads();
        const int64_t mine = chunks + (all_gather ? 0 : rank * CHUNK);
        for (int peer = 0; peer < RANKS; peer++)
            if (peer != rank) copy(received + peer * size + start, windows.of[peer] + mine, bytes);
    }
    if (threadIdx.x == 0) *counter = round;
}
