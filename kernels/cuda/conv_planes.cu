// Convolution with stride 1 on Hopper's matrix units: y = x * w, or TURNED the gradient by the images, which is the
// convolution of the outputs' gradients with the weights turned round. Read planes.cuh first.
//
// Rows are FILTERS filters, columns 256 positions, k CHANNELS channels of an element of the window at a time. Three warps
// gather the images' positions and cut them in pieces; one has the copies of weights, which are cut beforehand, on their
// way; two warpgroups multiply, each half of the columns.
//
// The largest products of pieces are exact. The matrix units, which cut bits off where they add, sum them over one
// element of the window; float32 additions go on. The others, 2^-8 of them, have sums of their own.
//
// Of 32 filters or fewer the pieces are STACKED: half of the rows are the first ones, the others the second ones of the
// same filters, or the third ones and zeros. Four products of these hold the six, and in the end rows are added.
#include "planes.cuh"

constexpr int HALF_TILE = 128, TILE = 2 * HALF_TILE, LEFT = 64; // LEFT: rows of the matrix units
constexpr bool STACKED = OUT_CHANNELS <= LEFT / 2;
constexpr int FILTERS = STACKED ? LEFT / 2 : LEFT, SUMMED = STACKED ? 3 : BESIDE;
constexpr int CONSUMERS = 2 * WARPGROUP, THREADS = WARPGROUP + CONSUMERS, GATHERERS = WARPGROUP - WARP;
constexpr int IMAGE_STAGES = 2, PLANES = CHANNELS / GROUP_OF;
constexpr int CHUNKS = (IN_CHANNELS + CHANNELS - 1) / CHANNELS, BLOCKS = (OUT_CHANNELS + FILTERS - 1) / FILTERS;
typedef Planes<TILE + REACH, PLANES> OfImages;
typedef Planes<LEFT, PLANES, STACKED ? 2 : PIECE_COUNT> OfWeights;
constexpr int SUMS = HALF_TILE / 2, OWN = SUMS * FILTERS / LEFT; // of a thread; that it writes
constexpr int EXCHANGED = STACKED ? OWN * WARPGROUP : 0;         // of a warpgroup, with `give`

// The products beside the largest ones.
__device__ constexpr Pair pair_of(int i) {
    constexpr Pair pairs[] = {{0, 2}, {1, 0}, {0, 1}};
    return STACKED ? pairs[i] : beside(i);
}

// Weights (O, C, KH, KW); TURNED (C, O, KH, KW) with their elements in reverse order.
struct Weights {
    const T *w;

    __device__ __forceinline__ T at(int filter, int channel, int tap) const {
        return TURNED ? w[(channel * OUT_CHANNELS + filter) * TAPS + TAPS - 1 - tap]
                      : w[(filter * IN_CHANNELS + channel) * TAPS + tap];
    }
};

// Weights to scratch, as the stages want them: for each FILTERS filters and CHANNELS channels the elements of the window,
// of each its pieces, of each its planes.
KERNEL cut_weights(const T *x, const T *w, const Epilogue epilogue, int64_t batch, char *scratch) {
    wait_for_inputs();
    const Weights weights = {w};
    for (int i = grid_index(); i < BLOCKS * CHUNKS * TAPS * PLANES * FILTERS; i += grid_size()) {
        const int line = i % FILTERS, plane = i / FILTERS % PLANES;
        const int stage = i / (FILTERS * PLANES), tap = stage % TAPS, chunk = stage / TAPS % CHUNKS;
        const int filter = stage / TAPS / CHUNKS * FILTERS + line, channel = chunk * CHANNELS + plane * GROUP_OF;
        float found[GROUP_OF];
        #pragma unroll
        for (int j = 0; j < GROUP_OF; j++)
            found[j] = filter < OUT_CHANNELS && channel + j < IN_CHANNELS ? weights.at(filter, channel + j, tap) : 0;
        Word words[PIECE_COUNT];
        cut(words, found);
        char *to = scratch + (int64_t)stage * OfWeights::SIZE;
        #pragma unroll
        for (int p = 0; p < PIECE_COUNT + STACKED; p++) {
            const int piece = STACKED ? p / 2 : p, row = STACKED ? line + p % 2 * FILTERS : line;
            *(Word *)(to + OfWeights::offset(piece, plane, row)) = p < PIECE_COUNT ? words[p] : Word{};
        }
    }
}

struct Stages {
    Barrier images[IMAGE_STAGES], images_read[IMAGE_STAGES], weights[TILE_STAGES], weights_read[TILE_STAGES];

    __device__ void init() {
        for (int i = 0; i < IMAGE_STAGES; i++) {
            images[i].init(GATHERERS / WARP);
            images_read[i].init(CONSUMERS / WARP);
        }
        for (int i = 0; i < TILE_STAGES; i++) {
            weights[i].init(1);
            weights_read[i].init(CONSUMERS / WARP);
        }
        show_barriers();
    }
};

// The tiles of a block: those of the same positions, which read the same images, at the same time.
struct Tiles {
    int count;

    __device__ explicit Tiles(int batch) : count(parts(batch * IMAGE, TILE) * BLOCKS) {}
    __device__ __forceinline__ int filter(int tile) const { return tile % BLOCKS * FILTERS; }
    __device__ __forceinline__ int position(int tile) const { return tile / BLOCKS * TILE; }
};

// Of one thread: starts the copies of weights.
__device__ __forceinline__ void bring(const Tiles &tiles, Stages &stages, char *shared, const char *scratch) {
    Round<TILE_STAGES> turn;
    for (int tile = blockIdx.x; tile < tiles.count; tile += gridDim.x) {
        const char *from = scratch + (int64_t)(tile % BLOCKS) * CHUNKS * TAPS * OfWeights::SIZE;
        for (int i = 0; i < CHUNKS * TAPS; i++, turn.next()) {
            stages.weights_read[turn.stage].wait(turn.parity ^ 1);
            Barrier &full = stages.weights[turn.stage];
            full.expect(OfWeights::SIZE);
            copy_bulk<OfWeights::SIZE>(shared + turn.stage * OfWeights::SIZE, from + (int64_t)i * OfWeights::SIZE, full);
        }
    }
}

__device__ __forceinline__ void gather(
    const Tiles &tiles, const Inputs &images, Stages &stages, char *shared, T *passing) {
    const int thread = threadIdx.x - WARP;
    Round<IMAGE_STAGES> turn;
    for (int tile = blockIdx.x; tile < tiles.count; tile += gridDim.x) {
        for (int chunk = 0; chunk < CHUNKS; chunk++, turn.next()) {
            images.gather<OfImages, GATHERERS>(shared + turn.stage * OfImages::SIZE, passing, thread,
                tiles.position(tile) - BEFORE, chunk * CHANNELS, stages.images_read[turn.stage], turn.parity ^ 1);
            show_to_matrix_units();
            say(stages.images[turn.stage]);
        }
    }
}

struct Sums {
    float main[SUMS], beside[SUMS];

    // Of a tile. images, weights: their stages in shared memory, the images' from this warpgroup's columns on.
    __device__ __forceinline__ void multiply(Stages &stages, const char *images, const char *weights,
        Round<IMAGE_STAGES> &image, Round<TILE_STAGES> &weight) {
        float high[SUMS];
        #pragma unroll
        for (int i = 0; i < SUMS; i++) main[i] = 0;
        int last_image = 0, last_weight = 0;
        for (int chunk = 0; chunk < CHUNKS; chunk++, image.next()) {
            stages.images[image.stage].wait(image.parity);
            for (int tap = 0; tap < TAPS; tap++, weight.next()) {
                stages.weights[weight.stage].wait(weight.parity);
                const char *left = weights + weight.stage * OfWeights::SIZE;
                const char *right = images + image.stage * OfImages::SIZE + shift(tap / KW, tap % KW) * WORD;
                const uint64_t a = described(left, OfWeights::PLANE, UNIT_BYTES, NOT_EXCHANGED);
                const uint64_t b = described(right, OfImages::PLANE, UNIT_BYTES, NOT_EXCHANGED);
                const auto products = [&](float (&sums)[SUMS], Pair pieces, bool add) {
                    #pragma unroll
                    for (int k = 0; k < PLANES; k += 2)
                        start<BFLOAT16>(sums, a + OfWeights::offset(pieces.a, k, 0) / WORD,
                            b + OfImages::offset(pieces.b, k, 0) / WORD, add || k > 0);
                };
                Started::begin();
                products(high, {0, 0}, false);
                Started::end();
                Started::finished<1>();
                if (chunk + tap > 0) say(stages.weights_read[last_weight]);
                if (chunk > 0 && tap == 0) say(stages.images_read[last_image]);
                #pragma unroll
                for (int i = 0; i < SUMMED; i++) products(beside, pair_of(i), chunk + tap + i > 0);
                Started::end();
                Started::finished<1>();
                arrived(high);
                #pragma unroll
                for (int i = 0; i < SUMS; i++) main[i] += high[i];
                last_weight = weight.stage;
            }
            last_image = image.stage;
        }
        Started::finished<0>();
        arrived(beside);
        say(stages.weights_read[last_weight]);
        say(stages.images_read[last_image]);
        #pragma unroll
        for (int i = 0; i < SUMS; i++) main[i] += beside[i];
    }

    // Those that a thread writes. STACKED two threads have sums of a filter's pieces, and each adds up half of them;
    // what they give to each other passes through what the warpgroup has `exchanged`.
    __device__ __forceinline__ void give(float (&own)[OWN], T *exchanged) const {
        const int thread = threadIdx.x % WARPGROUP, place = threadIdx.x / WARPGROUP;
        const bool lower = thread < WARPGROUP / 2;
        #pragma unroll
        for (int i = 0; i < OWN; i++) {
            const float first = main[i], second = main[SUMS - OWN + i];
            own[i] = lower ? first : second;
            if (STACKED) exchanged[i * WARPGROUP + thread] = lower ? second : first;
        }
        if (!STACKED) return;
        meet(WARPGROUP, place);
        #pragma unroll
        for (int i = 0; i < OWN; i++) own[i] += exchanged[i * WARPGROUP + (thread ^ WARPGROUP / 2)];
        meet(WARPGROUP, place);
    }
};

// Of the sums that a thread writes: filter and column of sum i.
__device__ __forceinline__ int own_row(int i) { return sum_row(i) % FILTERS; }
__device__ __forceinline__ int own_column(int i) { return sum_row(i) / FILTERS * (HALF_TILE / 2) + sum_column(i); }

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
            sum = fma(inside ? x[from] : 0, weights.at(filter, channel, tap), sum);
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

// Hands the sums of FILTERS filters from `filter` on and HALF_TILE positions from `position` on to the epilogue, which is
// asked for what it reads beside several of them before the first one is written.
__device__ __forceinline__ void write(
    const float (&sums)[OWN], const Epilogue &out, int batch, int filter, int position) {
    constexpr int AT_ONCE = 4, EACH = 4; // EACH: sums of two neighbouring positions and two rows
    const auto row = [&](int i) { return filter + own_row(i); };
    #pragma unroll
    for (int h = 0; h < 2; h += WIDE_C) {
        Output at(position + own_column(h));
        #pragma unroll
        for (int first = h; first < OWN; first += AT_ONCE * EACH) {
            int image[AT_ONCE], place[AT_ONCE];
            Epilogue::Beside<WIDE_C> beside[AT_ONCE][2];
            const auto index = [&](int i, int r) {
                return (image[i] * OUT_CHANNELS + row(2 * r)) * (OUT_ROWS * OUT_COLUMNS) + place[i];
            };
            #pragma unroll
            for (int i = 0; i < AT_ONCE; i++, at.advance(8)) { // 8: own_column(EACH) - own_column(0)
                image[i] = at.image;
                place[i] = at.inside(batch) ? at.y * OUT_COLUMNS + at.x : -1;
                #pragma unroll
                for (int r = 0; r < 2; r++)
                    if (place[i] >= 0 && row(2 * r) < OUT_CHANNELS)
                        beside[i][r] = out.read<WIDE_C>(image[i], row(2 * r), place[i], index(i, r));
            }
            #pragma unroll
            for (int i = 0; i < AT_ONCE; i++) {
                #pragma unroll
                for (int r = 0; r < 2; r++) {
                    T value[WIDE_C];
                    #pragma unroll
                    for (int k = 0; k < WIDE_C; k++) value[k] = sums[first + i * EACH + 2 * r + k];
                    if (place[i] >= 0 && row(2 * r) < OUT_CHANNELS) out.write(beside[i][r], index(i, r), value);
                }
            }
        }
    }
}

KERNEL __launch_bounds__(THREADS, 1) conv_planes(
    const T *x, const T *w, const Epilogue epilogue, int64_t batch, char *scratch) {
    wait_for_inputs();
    const Inputs images = {x, (int)batch};
    const Tiles tiles(batch);
    char *of_images = (char *)(((uintptr_t)shared_bytes + 127) / 128 * 128);
    char *of_weights = of_images + IMAGE_STAGES * OfImages::SIZE;
    T *passing = (T *)(of_weights + TILE_STAGES * OfWeights::SIZE);
    T *exchanged = passing + AHEAD * GROUP_OF * GATHERERS;
    __shared__ Stages stages;
    if (threadIdx.x == 0) stages.init();
    __syncthreads();
    if (threadIdx.x < WARPGROUP) {
        give_registers<56>();
        if (threadIdx.x == 0)
            bring(tiles, stages, of_weights, scratch);
        else if (threadIdx.x >= WARP)
            gather(tiles, images, stages, of_images, passing);
    } else {
        take_registers<224>();
        const int half = (threadIdx.x / WARPGROUP - 1) * HALF_TILE;
        Round<IMAGE_STAGES> image;
        Round<TILE_STAGES> weight;
        for (int tile = blockIdx.x; tile < tiles.count; tile += gridDim.x) {
            const int filter = tiles.filter(tile), position = tiles.position(tile) + half;
            Sums sums;
            sums.multiply(stages, of_images + half * WORD, of_weights, image, weight);
            float own[OWN];
            sums.give(own, exchanged + (threadIdx.x / WARPGROUP - 1) * EXCHANGED);
            repair(own, x, w, batch, filter, position);
            write(own, epilogue, batch, filter, position);
        }
    }
}
