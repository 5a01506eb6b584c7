// Convolution with stride 1 on Hopper's matrix units: y = x * w, or TURNED the gradient by the images, which is the
// convolution of the outputs' gradients with the weights turned round. Read conv/shifted_tiles.cuh first.
//
// Operands are in pieces. REST: only the outputs that conv/shifted_fp16x2.cu has left.
//
// The largest products of pieces are exact. The matrix units, which cut bits off where they add, sum them over one
// element of the window; float32 additions go on. The others, 2^-8 of them, have sums of their own.
//
// Of 32 filters or fewer the pieces are STACKED: half of the rows are the first ones, the others the second ones of the
// same filters, or the third ones and zeros. Four products of these hold the six, and in the end rows are added.
//
// POOLED: the epilogue is handed the windows of a max pooling, see `write_windows`.
#ifndef REST
#define REST 0
#endif
#ifndef TEAM_COLUMNS
#define TEAM_COLUMNS 128
#define OF_IMAGE 0
#define POOLED 0
#endif
constexpr int TEAMS = 2, COLUMNS = TEAM_COLUMNS, BRINGING = 128, GATHERERS = 96;
#include "conv/shifted_tiles.cuh"

constexpr int SUMMED = STACKED ? (TERMS_USED == 3 ? 3 : TERMS_USED - 1) : LOW_ORDER_PAIRS;
constexpr int AHEAD = 4; // words that a thread has under way
typedef Planes<TILE + REACH, PLANES> OfImages;
typedef PieceWeights OfWeights;

// What the launch asks for, and the scratch of the weights, as the rule computes them.
static_assert(SHARED_BYTES >= 128 + IMAGE_STAGES * OfImages::SIZE + TILE_STAGES * OfWeights::SIZE +
                  (AHEAD * CHUNK_ELEMENTS * GATHERERS + TEAMS * EXCHANGED) * (int)sizeof(T), "dynamic shared memory");
#ifdef WEIGHT_BYTES
static_assert(WEIGHT_BYTES >= (int64_t)BLOCKS * CHUNKS * TAPS * OfWeights::SIZE, "scratch");
#endif

// The products beside the largest ones.
__device__ constexpr TermPair pair_of(int i) {
    constexpr TermPair pairs[] = {{0, 2}, {1, 0}, {0, 1}};
    return STACKED ? pairs[3 - SUMMED + i] : low_order_pair(i);
}

// Weights to scratch, where conv/pack_images.cu has not put them.
KERNEL cut_weights(const T *x, const T *w, const Epilogue epilogue, int64_t batch, char *scratch) {
    wait_for_inputs();
    const Weights weights = {w};
    for (int i = grid_index(); i < BLOCKS * FILTERS * WEIGHT_WORDS; i += grid_size()) {
        const int filter = i % FILTERS + i / (FILTERS * WEIGHT_WORDS) * FILTERS;
        const WeightWord at(filter, i / FILTERS % WEIGHT_WORDS);
        float found[CHUNK_ELEMENTS];
        weights.read(found, filter, at.channel(), at.tap);
        put_pieces(scratch, at, found);
    }
}

__device__ __forceinline__ void gather_tile(const Inputs &images, int position, Stages &stages,
    PipelineState<IMAGE_STAGES> &turn, char *shared, T *passing) {
    for (int chunk = 0; chunk < CHUNKS; chunk++, turn.advance()) {
        images.gather<OfImages, GATHERERS, AHEAD>(PutPieces<OfImages>{shared + turn.stage * OfImages::SIZE}, passing,
            threadIdx.x - WARP, position - BEFORE, chunk * CHANNELS, stages.images_read[turn.stage], turn.phase ^ 1);
        fence_proxy_async();
        arrive_per_warp(stages.images[turn.stage]);
    }
}

struct Sums {
    float main[SUMS], beside[SUMS];

    // As in conv/shifted_fp16x2.cu.
    __device__ __forceinline__ void multiply(Stages &stages, const char *images, const char *weights, int team,
        bool begins, PipelineState<IMAGE_STAGES> &image, PipelineState<TILE_STAGES> &weight) {
        if (begins) stages.begin(team);
        float high[SUMS];
        #pragma unroll
        for (int i = 0; i < SUMS; i++) main[i] = 0;
        int last_image = 0, last_weight = 0;
        for (int chunk = 0; chunk < CHUNKS; chunk++, image.advance()) {
            stages.images[image.stage].wait(image.phase);
            for (int tap = 0; tap < TAPS; tap++, weight.advance()) {
                stages.weights[weight.stage].wait(weight.phase);
                const char *left = weights + weight.stage * OfWeights::SIZE;
                const char *right = images + image.stage * OfImages::SIZE + shift(tap / KW, tap % KW) * CHUNK_BYTES;
                const uint64_t a = smem_descriptor(left, OfWeights::PLANE, CORE_MATRIX_BYTES, NO_SWIZZLE);
                const uint64_t b = smem_descriptor(right, OfImages::PLANE, CORE_MATRIX_BYTES, NO_SWIZZLE);
                const auto products = [&](float (&sums)[SUMS], TermPair pieces, bool add) {
                    #pragma unroll
                    for (int k = 0; k < PLANES; k += 2)
                        wgmma<BFLOAT16, false, false>(sums, a + OfWeights::offset(pieces.a, k, 0) / CHUNK_BYTES,
                            b + OfImages::offset(pieces.b, k, 0) / CHUNK_BYTES, add || k > 0);
                };
                wgmma_fence();
                products(high, {0, 0}, false);
                wgmma_commit_group();
                wgmma_wait_group<1>();
                if (chunk + tap > 0) arrive_per_warp(stages.weights_read[last_weight]);
                if (chunk > 0 && tap == 0) arrive_per_warp(stages.images_read[last_image]);
                if (begins) stages.tell_next(team, chunk * TAPS + tap);
                #pragma unroll
                for (int i = 0; i < SUMMED; i++) products(beside, pair_of(i), chunk + tap + i > 0);
                wgmma_commit_group();
                wgmma_wait_group<1>();
                wgmma_fence_operand(high);
                #pragma unroll
                for (int i = 0; i < SUMS; i++) main[i] += high[i];
                last_weight = weight.stage;
            }
            last_image = image.stage;
        }
        wgmma_wait_group<0>();
        wgmma_fence_operand(beside);
        arrive_per_warp(stages.weights_read[last_weight]);
        arrive_per_warp(stages.images_read[last_image]);
        if (SUMMED == 0) return;
        #pragma unroll
        for (int i = 0; i < SUMS; i++) main[i] += beside[i];
    }
};

// An output by plain multiply-adds.
__device__ __noinline__ T plain(const T *x, const T *w, int filter, int position) {
    const Output at(position);
    const Weights weights = {w};
    T sum = 0;
    for (int channel = 0; channel < IN_CHANNELS; channel++) {
        for (int tap = 0; tap < TAPS; tap++) {
            const int down = at.y + tap / KW * DH - PH, right = at.x + tap % KW * DW - PW;
            const bool inside = (unsigned)down < IN_ROWS && (unsigned)right < IN_COLUMNS;
            const int from = (at.image * IN_CHANNELS + channel) * Inputs::AREA + down * IN_COLUMNS + right;
            sum = fma(inside ? rounded(x[from]) : 0, rounded(weights.at(filter, channel, tap)), sum);
        }
    }
    return sum;
}

// Pieces make NaN of infinities: what is not finite is computed again.
__device__ __forceinline__ void repair(
    float (&sums)[OWN], const T *x, const T *w, int batch, int filter, int position) {
    float zero = 0;
    #pragma unroll
    for (int i = 0; i < OWN; i++) zero = fma(sums[i], 0.0f, zero);
    if (zero == 0) return;
    #pragma unroll
    for (int i = 0; i < OWN; i++) {
        const int row = filter + own_row(i), at = position + own_column(i);
        if (!finite(sums[i]) && row < OUT_CHANNELS && Output(at).inside(batch)) sums[i] = plain(x, w, row, at);
    }
}

// What of the tiles of a block is computed here.
struct Taken {
    const Tiles &tiles;
    const Made &made;
    int positions; // of all images

    __device__ __forceinline__ bool takes(int tile) const {
        if (!REST) return true;
        const int filter = tiles.filter(tile), first = tiles.position(tile), end = min(first + TILE, positions);
        bool found = false;
        for (int position = first / MARKED * MARKED; position < end; position += MARKED)
            found |= made.left(position, filter);
        return found;
    }
    // From one on.
    __device__ __forceinline__ int next(int tile) const {
        while (tile < tiles.count && !takes(tile)) tile += gridDim.x;
        return tile;
    }
    __device__ __forceinline__ int first() const { return next(blockIdx.x); }
    __device__ __forceinline__ int after(int tile) const { return next(tile + gridDim.x); }

    // Whether there are any, asked by all threads.
    __device__ __forceinline__ bool any() const {
        __shared__ bool found;
        found = false;
        __syncthreads();
        for (int tile = blockIdx.x + threadIdx.x * gridDim.x; tile < tiles.count; tile += blockDim.x * gridDim.x)
            if (takes(tile)) found = true;
        __syncthreads();
        return found;
    }
};

// See `write`.
struct Given {
    const Made &made;
    int filter;
    float rows[2] = {1, 1};

    __device__ __forceinline__ bool takes(int position) const { return !REST || made.left(position, filter); }
    __device__ __forceinline__ float scale(int) const { return 1; }
};

KERNEL __launch_bounds__(THREADS, 1) conv_planes(const T *x, const T *w, const Epilogue epilogue, int64_t batch, char *scratch) {
    wait_for_inputs();
    const Inputs images = {x, (int)batch};
    const Tiles tiles(batch);
    const Made made(scratch);
    const Taken taken = {tiles, made, (int)batch * IMAGE};
    if (REST && !taken.any()) return;
    char *of_images = aligned_shared<128>();
    char *of_weights = of_images + IMAGE_STAGES * OfImages::SIZE;
    T *passing = (T *)(of_weights + TILE_STAGES * OfWeights::SIZE);
    T *exchanged = passing + AHEAD * CHUNK_ELEMENTS * GATHERERS;
    __shared__ Stages stages;
    if (threadIdx.x == 0) stages.init();
    __syncthreads();
    PipelineState<IMAGE_STAGES> image;
    PipelineState<TILE_STAGES> weight;
    if (threadIdx.x < BRINGING) {
        warpgroup_reg_dealloc<56>();
        if (threadIdx.x == 0) {
            for (int tile = taken.first(); tile < tiles.count; tile = taken.after(tile)) {
                if (!POOLED && !REST) ask(epilogue, batch, tiles.filter(tile), tiles.position(tile));
                stages.bring<OfWeights>(tile, weight, of_weights, made.pieces);
            }
        } else if (threadIdx.x >= WARP) {
            for (int tile = taken.first(); tile < tiles.count; tile = taken.after(tile))
                gather_tile(images, tiles.position(tile), stages, image, of_images, passing);
        }
    } else {
        warpgroup_reg_alloc<224>();
        const int team = own_team();
        for (int tile = taken.first(); tile < tiles.count; tile = taken.after(tile)) {
            const int filter = tiles.filter(tile), position = tiles.position(tile) + team * COLUMNS;
            Sums sums;
            const bool begins = !REST && tile == blockIdx.x;
            sums.multiply(stages, of_images + team * COLUMNS * CHUNK_BYTES, of_weights, team, begins, image, weight);
            float own[OWN];
            give(sums.main, own, exchanged + team * EXCHANGED);
            repair(own, x, w, batch, filter, position);
            if (POOLED)
                write_windows(own, epilogue, filter, position);
            else
                write(own, epilogue, batch, filter, position, Given{made, filter});
        }
    }
}
