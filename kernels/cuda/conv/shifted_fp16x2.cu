// The convolutions of conv/shifted_bf16x3.cu with operands in halves, three products instead of six, as far as these hold them; or,
// where operands are rounded, one product. Both operands are prepared beforehand (conv/pack_images.cu), so that nothing is
// measured or gathered here: one warp has the copies of weights on their way, one those of images, and with another adds
// squares up. Read conv/shifted_fp16x2.cuh first.
//
// high x high, products that are exact, is summed by the matrix units over an element of the window, and by float32 additions
// from there on. high x low and low x high have sums of their own, as what these lose is not to be of the size of the largest.
#include "conv/shifted_fp16x2.cuh"

static_assert(SHARED_BYTES >= 512 + IMAGE_STAGES * OfImages::SIZE + TILE_STAGES * OfWeights::SIZE, "dynamic shared memory");

struct AllStages : Stages {
    float squares[IMAGE_STAGES][TEAMS];      // of the lines that a warpgroup multiplies
    float shares[BLOCKS];                    // of a tile's filters, the least
    float signs[2][TEAMS][WARPGROUP / WARP]; // see Sums::right

    __device__ void find_shares(const Made &made) {
        for (int i = threadIdx.x / WARP; i < BLOCKS; i += THREADS / WARP) {
            float share = INFINITY;
            for (int j = threadIdx.x % WARP; j < FILTERS; j += WARP)
                share = fminf(share, made.filters[i * FILTERS + j].share);
            share = over_lanes<Min, WARP>(share);
            if (threadIdx.x % WARP == 0) shares[i] = share;
        }
    }

    // Of what a tile is made of, how many elements of an image are small; NOT_HELD where halves do not hold it.
    __device__ __forceinline__ int small(const Laid &laid, int batch, int tile, int position) const {
        const int end = min((position - BEFORE + TILE + REACH - 1) / IMAGE, batch - 1);
        float share = INFINITY;
        int most = 0;
        for (int image = max(position - BEFORE, 0) / IMAGE; image <= end; image++) {
            share = fminf(share, laid.known[image].share);
            most = max(most, laid.small[image]);
        }
        return share * shares[tile % BLOCKS] >= FEW && most <= MOST_SMALL ? most : NOT_HELD;
    }
};

// Of a warp for each team: the squares of its lines; the first one starts the copies for all.
__device__ __forceinline__ void bring_images(
    const Laid &laid, int position, AllStages &stages, PipelineState<IMAGE_STAGES> &turn, char *shared) {
    const int team = threadIdx.x / WARP - 1, lane = threadIdx.x % WARP;
    for (int chunk = 0; chunk < CHUNKS; chunk++, turn.advance()) {
        float squares = 0;
        if (NUMBERS == 2) {
            const float *of_lines = laid.squares + (int64_t)chunk * laid.count + position + SKIPPED + team * COLUMNS;
            for (int i = lane; i < COLUMNS + REACH; i += WARP) squares += of_lines[i];
            squares = over_lanes<Sum, WARP>(squares);
        }
        stages.images_read[turn.stage].wait(turn.phase ^ 1);
        if (lane > 0) continue;
        Mbarrier &full = stages.images[turn.stage];
        stages.squares[turn.stage][team] = squares;
        if (team > 0) {
            full.arrive();
            continue;
        }
        full.arrive_expect_tx(OfImages::SIZE);
        #pragma unroll
        for (int i = 0; i < NUMBERS; i++) {
            char *to = shared + turn.stage * OfImages::SIZE + i * OfImages::NUMBER;
            bulk_copy<OfImages::NUMBER>(to, laid.at(i, chunk, position), full);
        }
    }
}

struct Sums {
    float main[SUMS], squares; // of the lines

    // Of a tile. images, weights: their stages in shared memory, the images' from this warpgroup's columns on. begins:
    // the first one of the block.
    __device__ __forceinline__ void multiply(AllStages &stages, const char *images, const char *weights, int team,
        bool begins, PipelineState<IMAGE_STAGES> &image, PipelineState<TILE_STAGES> &weight) {
        float beside[SUMS];
        squares = 0;
        #pragma unroll
        for (int i = 0; i < SUMS; i++) main[i] = 0;
        if (begins) stages.begin(team);
        int last = 0; // stages of which products may still read
        for (int chunk = 0, element = 0; chunk < CHUNKS; chunk++, image.advance()) {
            stages.images[image.stage].wait(image.phase);
            squares += stages.squares[image.stage][team];
            #pragma unroll 1
            for (int tap = 0; tap < TAPS; tap++, element++, weight.advance()) {
                stages.weights[weight.stage].wait(weight.phase);
                const char *left = weights + weight.stage * OfWeights::SIZE;
                const char *right = images + image.stage * OfImages::SIZE + shift(tap / KW, tap % KW) * LINE;
                const uint64_t a = smem_descriptor(left, OfWeights::PLANE, CORE_MATRIX_BYTES, NO_SWIZZLE);
                const uint64_t b = smem_descriptor(right, CHUNK_BYTES, 8 * LINE, SWIZZLE_64B);
                const auto products = [&](float (&sums)[SUMS], TermPair parts, bool more) {
                    #pragma unroll
                    for (int k = 0; k < PLANES; k += 2)
                        wgmma<FP16X2>(sums, a + OfWeights::offset(parts.a, k, 0) / CHUNK_BYTES,
                            b + (parts.b * OfImages::NUMBER) / CHUNK_BYTES + k, more || k > 0);
                };
                float high[SUMS];
                wgmma_fence();
                products(NUMBERS == 1 ? main : high, {0, 0}, NUMBERS == 1 && element > 0);
                wgmma_commit_group();
                wgmma_wait_group<1>();
                if (element > 0) arrive_per_warp(stages.weights_read[last]);
                if (chunk > 0 && tap == 0) arrive_per_warp(stages.images_read[(image.stage + 1) % IMAGE_STAGES]);
                last = weight.stage;
                if (begins) stages.tell_next(team, element);
                if (NUMBERS == 1) continue;
                products(beside, {0, 1}, element > 0);
                products(beside, {1, 0}, true);
                wgmma_commit_group();
                wgmma_wait_group<1>();
                wgmma_fence_operand(high);
                #pragma unroll
                for (int i = 0; i < SUMS; i++) main[i] += high[i];
            }
        }
        wgmma_wait_group<0>();
        wgmma_fence_operand(NUMBERS == 1 ? main : beside);
        arrive_per_warp(stages.weights_read[last]);
        arrive_per_warp(stages.images_read[(image.stage + 1) % IMAGE_STAGES]);
        if (NUMBERS == 1) return;
        #pragma unroll
        for (int i = 0; i < SUMS; i++) main[i] = fma(beside[i], LOW, main[i]);
    }

    // Whether the sums that a warpgroup writes are not small beside their products, nor beside what small elements lose.
    // filters: of a thread's rows, the sum of the squares of their elements. small: elements of an image, at most.
    __device__ __forceinline__ bool right(
        float filters, int small, AllStages &stages, int team, int &parity) const {
        if (NUMBERS == 1 && small == 0) return true;
        parity ^= 1; // only where warps meet: so who writes has seen all of them here since the signs were read
        float sign = 0;
        if (NUMBERS == 2) {
            // Less what products give, over LEAST: OWN / 2 sums of each of two rows, whose weights' mean square for a channel
            // is filters / IN_CHANNELS, by lines' of squares / (COLUMNS + REACH).
            sign = -filters / IN_CHANNELS * squares * (OWN / 2.0f / (COLUMNS + REACH) / LEAST);
            #pragma unroll
            for (int i = 0; i < OWN; i++) sign = fma(main[i], main[i], sign);
        }
        if (any_below(main, small * FOR_SMALL)) sign = -INFINITY;
        sign = over_lanes<Sum, WARP>(sign);
        float (&signs)[WARPGROUP / WARP] = stages.signs[parity][team];
        if (threadIdx.x % WARP == 0) signs[threadIdx.x % WARPGROUP / WARP] = sign;
        named_barrier_sync(WARPGROUP, threadIdx.x / WARPGROUP);
        return signs[0] + signs[1] + signs[2] + signs[3] >= 0;
    }
};

// See `write`.
struct Given {
    const Known *images;
    float rows[2];

    __device__ __forceinline__ bool takes(int) const { return true; }
    __device__ __forceinline__ float scale(int image) const { return images[image].down; }
};

KERNEL __launch_bounds__(THREADS, 1) conv_halves(
    const T *x, const T *w, const Epilogue epilogue, int64_t batch, char *scratch) {
    wait_for_inputs();
    const Tiles tiles(batch);
    const Made made(scratch);
    const Laid laid = laid_images(made, batch);
    char *of_images = aligned_shared<512>();
    char *of_weights = of_images + IMAGE_STAGES * OfImages::SIZE;
    __shared__ AllStages stages;
    if (threadIdx.x == 0) stages.init();
    stages.find_shares(made);
    __syncthreads();
    const auto small_in = [&](int tile) { return stages.small(laid, batch, tile, tiles.position(tile)); };
    PipelineState<IMAGE_STAGES> image;
    PipelineState<TILE_STAGES> weight;
    if (threadIdx.x < BRINGING) {
        warpgroup_reg_dealloc<40>();
        if (threadIdx.x == 0) {
            for (int tile = blockIdx.x; tile < tiles.count; tile += gridDim.x)
                if (small_in(tile) != NOT_HELD) {
                    ask(epilogue, batch, tiles.filter(tile), tiles.position(tile));
                    stages.bring<OfWeights>(tile, weight, of_weights, made.halves);
                }
        } else if (threadIdx.x >= WARP && threadIdx.x < WARP + GATHERERS) {
            for (int tile = blockIdx.x; tile < tiles.count; tile += gridDim.x)
                if (small_in(tile) != NOT_HELD) bring_images(laid, tiles.position(tile), stages, image, of_images);
        }
    } else {
        warpgroup_reg_alloc<232>();
        const int team = own_team();
        bool begins = true;
        for (int tile = blockIdx.x, parity = 0; tile < tiles.count; tile += gridDim.x) {
            const int filter = tiles.filter(tile), position = tiles.position(tile) + team * COLUMNS;
            const int small = small_in(tile);
            const bool first = threadIdx.x % WARPGROUP == 0;
            if (first) made.left(position, filter) = small == NOT_HELD;
            if (small == NOT_HELD) continue;
            Sums sums;
            sums.multiply(stages, of_images + (SKIPPED + team * COLUMNS) * LINE, of_weights, team, begins, image, weight);
            begins = false;
            const Known rows[2] = {made.filters[filter + own_row(0)], made.filters[filter + own_row(2)]};
            if (sums.right(rows[0].squares + rows[1].squares, small, stages, team, parity))
                write(sums.main, epilogue, batch, filter, position, Given{laid.known, {rows[0].down, rows[1].down}});
            else if (first)
                made.left(position, filter) = true;
        }
    }
}
