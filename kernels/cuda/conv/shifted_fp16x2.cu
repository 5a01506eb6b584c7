// The convolutions of conv/shifted_bf16x3.cu with operands in halves, three products instead of six, as far as these hold them; or,
// where operands are rounded, one product. Both operands are prepared beforehand (conv/pack_images.cu), so that nothing is
// measured or gathered here: one warp has the copies of weights on their way, one those of images, and with another adds
// squares up. Read conv/shifted_fp16x2.cuh first.
//
// high x high, products that are exact, is summed by the matrix units over an element of the window, and by float32 additions
// from there on. high x low and low x high have sums of their own, as what these lose is not to be of the size of the largest.
#include "conv/shifted_fp16x2.cuh"

static_assert(SHARED_BYTES >= 512 + IMAGE_STAGES * ImageLayout::SIZE + WEIGHT_STAGES * WeightLayout::SIZE, "dynamic shared memory");

struct Fp16x2Pipeline : ConvPipeline {
    float squares[IMAGE_STAGES][MMA_WARPGROUPS];      // of the lines that a warpgroup multiplies
    float shares[FILTER_BLOCKS];                    // of a tile's filters, the least
    float signs[2][MMA_WARPGROUPS][WARPGROUP / WARP]; // see Fp16x2Accumulator::right

    __device__ void load_filter_shares(const ConvScratch &made) {
        for (int i = threadIdx.x / WARP; i < FILTER_BLOCKS; i += THREADS / WARP) {
            float share = INFINITY;
            for (int j = threadIdx.x % WARP; j < FILTERS; j += WARP)
                share = fminf(share, made.filters[i * FILTERS + j].share);
            share = over_lanes<Min, WARP>(share);
            if (threadIdx.x % WARP == 0) shares[i] = share;
        }
    }

    // Of what a tile is made of, how many elements of an image are small; NOT_REPRESENTABLE where halves do not hold it.
    __device__ __forceinline__ int small(const PackedImages &laid, int batch, int tile, int position) const {
        const int end = min((position - REACH_BACK + TILE + REACH - 1) / IMAGE_PITCH, batch - 1);
        float share = INFINITY;
        int most = 0;
        for (int image = max(position - REACH_BACK, 0) / IMAGE_PITCH; image <= end; image++) {
            share = fminf(share, laid.known[image].share);
            most = max(most, laid.small[image]);
        }
        return share * shares[tile % FILTER_BLOCKS] >= MIN_PRODUCTS && most <= MAX_SMALL ? most : NOT_REPRESENTABLE;
    }
};

// Of a warp for each warpgroup: the squares of its lines; the first one starts the copies for all.
__device__ __forceinline__ void load_images(
    const PackedImages &laid, int position, Fp16x2Pipeline &stages, PipelineState<IMAGE_STAGES> &turn, char *shared) {
    const int warpgroup = threadIdx.x / WARP - 1, lane = threadIdx.x % WARP;
    for (int chunk = 0; chunk < CHANNEL_BLOCKS; chunk++, turn.advance()) {
        float squares = 0;
        if (FP16_PARTS == 2) {
            const float *of_lines = laid.squares + (int64_t)chunk * laid.count + position + SKIPPED_ROWS + warpgroup * COLUMNS;
            for (int i = lane; i < COLUMNS + REACH; i += WARP) squares += of_lines[i];
            squares = over_lanes<Sum, WARP>(squares);
        }
        stages.images_read[turn.stage].wait(turn.phase ^ 1);
        if (lane > 0) continue;
        Mbarrier &full = stages.images[turn.stage];
        stages.squares[turn.stage][warpgroup] = squares;
        if (warpgroup > 0) {
            full.arrive();
            continue;
        }
        full.arrive_expect_tx(ImageLayout::SIZE);
        #pragma unroll
        for (int i = 0; i < FP16_PARTS; i++) {
            char *to = shared + turn.stage * ImageLayout::SIZE + i * ImageLayout::NUMBER;
            bulk_copy<ImageLayout::NUMBER>(to, laid.at(i, chunk, position), full);
        }
    }
}

struct Fp16x2Accumulator {
    float main[SUMS], squares; // of the lines

    // Of a tile. images, weights: their stages in shared memory, the images' from this warpgroup's columns on. first_tile:
    // the first one of the block.
    __device__ __forceinline__ void multiply(Fp16x2Pipeline &stages, const char *images, const char *weights, int warpgroup,
        bool first_tile, PipelineState<IMAGE_STAGES> &image, PipelineState<WEIGHT_STAGES> &weight) {
        float low[SUMS];
        squares = 0;
        #pragma unroll
        for (int i = 0; i < SUMS; i++) main[i] = 0;
        if (first_tile) stages.wait_for_start(warpgroup);
        int last = 0; // stages of which products may still read
        for (int chunk = 0, element = 0; chunk < CHANNEL_BLOCKS; chunk++, image.advance()) {
            stages.images[image.stage].wait(image.phase);
            squares += stages.squares[image.stage][warpgroup];
            #pragma unroll 1
            for (int tap = 0; tap < TAPS; tap++, element++, weight.advance()) {
                stages.weights[weight.stage].wait(weight.phase);
                const char *left = weights + weight.stage * WeightLayout::SIZE;
                const char *right = images + image.stage * ImageLayout::SIZE + tap_offset(tap / KW, tap % KW) * ROW_BYTES;
                const uint64_t a = smem_descriptor(left, WeightLayout::GROUP_BYTES, CORE_MATRIX_BYTES, NO_SWIZZLE);
                const uint64_t b = smem_descriptor(right, CHUNK_BYTES, 8 * ROW_BYTES, SWIZZLE_64B);
                const auto products = [&](float (&sums)[SUMS], TermPair parts, bool more) {
                    #pragma unroll
                    for (int k = 0; k < GROUPS; k += 2)
                        wgmma<FP16X2>(sums, a + WeightLayout::offset(parts.a, k, 0) / CHUNK_BYTES,
                            b + (parts.b * ImageLayout::NUMBER) / CHUNK_BYTES + k, more || k > 0);
                };
                float high[SUMS];
                wgmma_fence();
                products(FP16_PARTS == 1 ? main : high, {0, 0}, FP16_PARTS == 1 && element > 0);
                wgmma_commit_group();
                wgmma_wait_group<1>();
                if (element > 0) arrive_per_warp(stages.weights_read[last]);
                if (chunk > 0 && tap == 0) arrive_per_warp(stages.images_read[(image.stage + 1) % IMAGE_STAGES]);
                last = weight.stage;
                if (first_tile) stages.start_next(warpgroup, element);
                if (FP16_PARTS == 1) continue;
                products(low, {0, 1}, element > 0);
                products(low, {1, 0}, true);
                wgmma_commit_group();
                wgmma_wait_group<1>();
                wgmma_fence_operand(high);
                #pragma unroll
                for (int i = 0; i < SUMS; i++) main[i] += high[i];
            }
        }
        wgmma_wait_group<0>();
        wgmma_fence_operand(FP16_PARTS == 1 ? main : low);
        arrive_per_warp(stages.weights_read[last]);
        arrive_per_warp(stages.images_read[(image.stage + 1) % IMAGE_STAGES]);
        if (FP16_PARTS == 1) return;
        #pragma unroll
        for (int i = 0; i < SUMS; i++) main[i] = fma(low[i], LOW, main[i]);
    }

    // Whether the sums that a warpgroup writes are not small low their products, nor low what small elements lose.
    // filters: of a thread's rows, the sum of the squares of their elements. small: elements of an image, at most.
    __device__ __forceinline__ bool right(
        float filters, int small, Fp16x2Pipeline &stages, int warpgroup, int &parity) const {
        if (FP16_PARTS == 1 && small == 0) return true;
        parity ^= 1; // only where warps meet: so who writes has seen all of them here since the signs were read
        float sign = 0;
        if (FP16_PARTS == 2) {
            // Less what products give, over MAX_CANCELLATION: OUTPUTS / 2 sums of each of two rows, whose weights' mean square for a channel
            // is filters / IN_CHANNELS, by lines' of squares / (COLUMNS + REACH).
            sign = -filters / IN_CHANNELS * squares * (OUTPUTS / 2.0f / (COLUMNS + REACH) / MAX_CANCELLATION);
            #pragma unroll
            for (int i = 0; i < OUTPUTS; i++) sign = fma(main[i], main[i], sign);
        }
        if (any_below(main, small * SMALL_ELEMENT_LOSS)) sign = -INFINITY;
        sign = over_lanes<Sum, WARP>(sign);
        float (&signs)[WARPGROUP / WARP] = stages.signs[parity][warpgroup];
        if (threadIdx.x % WARP == 0) signs[threadIdx.x % WARPGROUP / WARP] = sign;
        named_barrier_sync(WARPGROUP, threadIdx.x / WARPGROUP);
        return signs[0] + signs[1] + signs[2] + signs[3] >= 0;
    }
};

// See `write`.
struct Unscale {
    const Statistics *images;
    float rows[2];

    __device__ __forceinline__ bool takes(int) const { return true; }
    __device__ __forceinline__ float scale(int image) const { return images[image].down; }
};

KERNEL __launch_bounds__(THREADS, 1) conv_shifted_fp16x2(
    const T *x, const T *w, const Epilogue epilogue, int64_t batch, char *scratch) {
    wait_for_inputs();
    const Tiles tiles(batch);
    const ConvScratch made(scratch);
    const PackedImages laid = laid_images(made, batch);
    char *of_images = aligned_shared<512>();
    char *of_weights = of_images + IMAGE_STAGES * ImageLayout::SIZE;
    __shared__ Fp16x2Pipeline stages;
    if (threadIdx.x == 0) stages.init();
    stages.load_filter_shares(made);
    __syncthreads();
    const auto small_in = [&](int tile) { return stages.small(laid, batch, tile, tiles.position(tile)); };
    PipelineState<IMAGE_STAGES> image;
    PipelineState<WEIGHT_STAGES> weight;
    if (threadIdx.x < PRODUCERS) {
        warpgroup_reg_dealloc<40>();
        if (threadIdx.x == 0) {
            for (int tile = blockIdx.x; tile < tiles.count; tile += gridDim.x)
                if (small_in(tile) != NOT_REPRESENTABLE) {
                    prefetch_aux(epilogue, batch, tiles.filter(tile), tiles.position(tile));
                    stages.load_weights<WeightLayout>(tile, weight, of_weights, made.fp16_weights);
                }
        } else if (threadIdx.x >= WARP && threadIdx.x < WARP + LOADERS) {
            for (int tile = blockIdx.x; tile < tiles.count; tile += gridDim.x)
                if (small_in(tile) != NOT_REPRESENTABLE) load_images(laid, tiles.position(tile), stages, image, of_images);
        }
    } else {
        warpgroup_reg_alloc<232>();
        const int warpgroup = consumer_warpgroup();
        bool first_tile = true;
        for (int tile = blockIdx.x, parity = 0; tile < tiles.count; tile += gridDim.x) {
            const int filter = tiles.filter(tile), position = tiles.position(tile) + warpgroup * COLUMNS;
            const int small = small_in(tile);
            const bool first = threadIdx.x % WARPGROUP == 0;
            if (first) made.falls_back(position, filter) = small == NOT_REPRESENTABLE;
            if (small == NOT_REPRESENTABLE) continue;
            Fp16x2Accumulator sums;
            sums.multiply(stages, of_images + (SKIPPED_ROWS + warpgroup * COLUMNS) * ROW_BYTES, of_weights, warpgroup, first_tile, image, weight);
            first_tile = false;
            const Statistics rows[2] = {made.filters[filter + output_row(0)], made.filters[filter + output_row(2)]};
            if (sums.right(rows[0].squares + rows[1].squares, small, stages, warpgroup, parity))
                write(sums.main, epilogue, batch, filter, position, Unscale{laid.known, {rows[0].down, rows[1].down}});
            else if (first)
                made.falls_back(position, filter) = true;
        }
    }
}
