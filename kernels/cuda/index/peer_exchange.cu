// Exchanges bytes between GPUs that have mapped each other's windows, by loads through NVLink or PCIe.
//
// A block has two buffers of one chunk for every rank in each window, which it uses in turn. It writes chunks to its own window.
// In the next round it reads its chunks from the peers' windows. It writes to a chunk again two rounds later. By then each peer
// has begun the round between, and so has read the chunk.
//
// Block b waits for block b of the peers. All blocks fit on each GPU at the same time (exchanges.py): else the blocks that run on
// two GPUs could wait for blocks that have not begun.
//
// Macros (peer_window.py): BLOCKS: the most blocks of a grid. CHUNK: bytes of a chunk. Others: peer_window.cuh.
#include "index/peer_window.cuh"

// all_gather: item r of `received` is what rank r has sent. Otherwise (all-to-all) it is item `rank` of what rank r has sent.
// size: bytes of an item.
KERNEL peer_exchange(const char *sent, char *received, const __grid_constant__ Windows windows, int64_t size, int64_t all_gather)
{
    const int64_t rank = windows.rank;
    Rounds rounds(windows);
    for (int64_t start = (int64_t)blockIdx.x * CHUNK; start < size; start += (int64_t)gridDim.x * CHUNK) {
        const int64_t bytes = size - start < CHUNK ? size - start : CHUNK;
        const int64_t chunks = ((~rounds.number & 1) * BLOCKS + blockIdx.x) * (int64_t)RANKS * CHUNK;
        copy_bytes(received + rank * size + start, sent + (all_gather ? 0 : rank * size) + start, bytes);
        if (all_gather) copy_bytes(windows.own() + chunks, sent + start, bytes); // one chunk for all peers
        for (int peer = 0; peer < RANKS; peer++)
            if (peer != rank && !all_gather)
                copy_bytes(windows.own() + chunks + peer * CHUNK, sent + peer * size + start, bytes);
        rounds.next();
        const int64_t mine = chunks + (all_gather ? 0 : rank * CHUNK);
        for (int peer = 0; peer < RANKS; peer++)
            if (peer != rank) copy_bytes(received + peer * size + start, windows.of[peer] + mine, bytes);
    }
    rounds.end();
}
