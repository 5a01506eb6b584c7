// Convolution as implicit GEMM: a matrix product whose panels are gathered from the images while they are loaded. The
// matrix of windows, KH * KW times as large as the images, is never stored; shared memory holds BK rows of it.
//
// The kernels: conv2d and conv2d_input_grad; if WEIGHT_GRAD, conv2d_weight_grad. Other macros: kernel KH x KW, stride
// SH x SW, padding PH x PW, dilation DH x DW, WIDE_C, SPLIT, and the tile (gemm/gemm.cu).
#include "common/epilogue.cuh"
#include "gemm/mma.cuh"

typedef Tile<TILE_M, TILE_N, TILE_K, TILE_SLICES, TILE_STAGES, WarpMma<WARP_M, WARP_N, MMA_KIND>::type, SHARED_BYTES> BlockTile;
typedef BlockTile::PanelsA PanelsA;
typedef BlockTile::PanelsB PanelsB;
constexpr int BM = TILE_M, BN = TILE_N, BK = TILE_K, THREADS = BlockTile::THREADS;

#define CONV_NUMBERS                                                                                                   \
    int64_t batch_, int64_t channels_, int64_t height_, int64_t width_, int64_t filters_, int64_t rows_,               \
        int64_t columns_, int64_t groups_
// Images are batch x channels x height x width, outputs batch x filters x rows x columns.
#define CONV                                                                                                           \
    const int batch = batch_, channels = channels_, height = height_, width = width_, filters = filters_,              \
              rows = rows_, columns = columns_, groups = groups_, group_channels = channels / groups,                  \
              group_filters = filters / groups;

constexpr int OUTSIDE = -(1 << 30); // a coordinate that is outside every image, also after adding a tap's offset

// Loads panels [k][pixel] of windows; k runs over channels, rows and columns of taps. A thread always has the same
// pixels (BN is a multiple of THREADS), and all threads have the same k, so that the work for k is uniform.
struct WindowLoader {
    static constexpr int OWN = BN / THREADS;
    const T *corner[OWN > 0 ? OWN : 1]; // element of channel 0 and tap (0, 0)
    int y[OWN > 0 ? OWN : 1], x[OWN > 0 ? OWN : 1]; // of the corner
    int channels, height, width; // of the images
    int taps_y, taps_x, step_y, step_x; // numbers of taps, and their distances
    int channel = 0, tap_y = 0, tap_x = 0; // of the next k

    __device__ WindowLoader(int channels, int height, int width, int taps_y, int taps_x, int step_y, int step_x)
        : channels(channels), height(height), width(width), taps_y(taps_y), taps_x(taps_x), step_y(step_y),
          step_x(step_x) {}

    __device__ __forceinline__ void set(int i, const T *image, int at_y, int at_x) {
        y[i] = at_y;
        x[i] = at_x;
        corner[i] = image + (int64_t)at_y * width + at_x;
    }

    __device__ __forceinline__ void load(T *panel) {
        #pragma unroll
        for (int row = 0; row < BK; row++) {
            const int dy = tap_y * step_y, dx = tap_x * step_x;
            const int64_t offset = (int64_t)channel * (height * width) + dy * width + dx;
            #pragma unroll
            for (int i = 0; i < OWN; i++) {
                const bool inside = (unsigned)(y[i] + dy) < height && (unsigned)(x[i] + dx) < width;
                cp_async<sizeof(T)>(panel + row * PanelsB::ROW + threadIdx.x + i * THREADS, corner[i] + offset,
                    inside && channel < channels);
            }
            if (++tap_x == taps_x) {
                tap_x = 0;
                if (++tap_y == taps_y) {
                    tap_y = 0;
                    channel++;
                }
            }
        }
    }
};

// The destination of a column: `pixel` of `area` pixels in an image of `channels` channels. `channel` is that of row 0.
struct OutputColumn {
    int image, channel, channels, pixel;
    int64_t area;
};

// The epilogue of a tile, for WIDE_C neighbouring columns at once; find(column) gives the first OutputColumn.
// Auxiliary inputs of a column are loaded before its first element is written.
template <class Out, class Find> __device__ __forceinline__ void write_tile(
    const BlockTile &tile, const Out &out, int m0, int n0, int m, int n, Find find) {
    #pragma unroll
    for (int j = 0; j < BlockTile::TN; j += WIDE_C) {
        const int column = n0 + tile.column(j);
        if (column >= n) continue;
        const OutputColumn at = find(column);
        const auto channel = [&](int i) { return at.channel + m0 + tile.row(i); };
        const auto index = [&](int i) { return ((int64_t)at.image * at.channels + channel(i)) * at.area + at.pixel; };
        typename Out::template Aux<WIDE_C> aux[BlockTile::TM];
        #pragma unroll
        for (int i = 0; i < BlockTile::TM; i++)
            if (m0 + tile.row(i) < m)
                aux[i] = out.template load_aux<WIDE_C>(at.image, channel(i), at.pixel, index(i));
        #pragma unroll
        for (int i = 0; i < BlockTile::TM; i++) {
            T value[WIDE_C];
            #pragma unroll
            for (int h = 0; h < WIDE_C; h++) value[h] = tile.sums[i][j + h];
            if (m0 + tile.row(i) < m) out.write(aux[i], index(i), value);
        }
    }
}

#if !WEIGHT_GRAD
// y = x * w: images (N, C, H, W), weights (O, C / groups, KH, KW), output (N, O, OH, OW).
//
// A matrix product for each group: rows are filters, columns the pixels of all outputs, k the elements of a window.
KERNEL __launch_bounds__(THREADS, MIN_BLOCKS) conv2d(const T *x, const T *w, const Epilogue epilogue, CONV_NUMBERS) {
    wait_for_inputs();
    CONV
    const int tiles_m = (group_filters + BM - 1) / BM, group = blockIdx.y;
    // Tiles of the same pixels are neighbours in the grid: they load the same windows.
    const int m0 = blockIdx.x % tiles_m * BM, n0 = blockIdx.x / tiles_m * BN;
    const int area = rows * columns, pixels = batch * area, taps = group_channels * KH * KW;
    static_assert(BN % THREADS == 0, "a thread always has the same pixels");
    BlockTile tile;

    PanelsA::LoadTransposed weights(w + ((int64_t)group * group_filters + m0) * taps, taps, group_filters - m0, taps);
    WindowLoader windows(group_channels, height, width, KH, KW, DH, DW);
    #pragma unroll
    for (int i = 0; i < WindowLoader::OWN; i++) {
        const int pixel = n0 + threadIdx.x + i * THREADS, image = pixel / area, at = pixel % area;
        const T *source = x + ((int64_t)image * channels + group * group_channels) * height * width;
        if (pixel < pixels)
            windows.set(i, source, at / columns * SH - PH, at % columns * SW - PW);
        else
            windows.set(i, x, OUTSIDE, OUTSIDE);
    }
    tile.multiply(weights, windows, (taps + BK - 1) / BK);
    if (tile.slice > 0) return;
    write_tile(tile, epilogue, m0, n0, group_filters, pixels, [&](int pixel) {
        return OutputColumn{pixel / area, group * group_filters, filters, pixel % area, area};
    });
}

// Input gradient: output gradients g (N, O, OH, OW) and weights to (N, C, H, W).
//
// Tap r multiplies row h of an image for output row (h + PH - r DH) / SH, if that is an integer. Rows a, a + SH, a + 2 SH,
// ... have the same taps: every TAP_STEP-th one. The pixels of such rows and columns are a phase. Each phase is a
// convolution of g with its flipped taps; blockIdx.z is the phase.
__device__ constexpr int common_factor(int a, int b) { return b == 0 ? a : common_factor(b, a % b); }
constexpr int TAP_STEP_Y = SH / common_factor(DH, SH), TAP_STEP_X = SW / common_factor(DW, SW);

// The first tap of a phase; `taps` if it has none.
template <int STRIDE, int PADDING, int DILATION, int TAP_STEP> __device__ int first_tap(int phase, int taps) {
    for (int tap = 0; tap < TAP_STEP && tap < taps; tap++) {
        if ((phase + PADDING - tap * DILATION) % STRIDE == 0) return tap;
    }
    return taps;
}

// Loads panels [k][channel] of the weights (O, C / groups, KH, KW); k runs over filters and the phase's taps.
struct TapLoader {
    typedef PanelsA At;
    const T *weights; // tap (first_y, first_x) of the group's first filter and the tile's first channel
    int filters, channels, remaining, taps_y, taps_x, k = 0; // channels: of the group; remaining: from the tile's first

    __device__ __forceinline__ void load(T *panel) {
        #pragma unroll
        for (int i = 0; i < At::COPIES; i++) {
            const int row = At::row(i), column = At::column(i);
            const int filter = (k + row) / (taps_y * taps_x), tap = (k + row) % (taps_y * taps_x);
            const int at = tap / taps_x * (TAP_STEP_Y * KW) + tap % taps_x * TAP_STEP_X;
            cp_async<sizeof(T)>(panel + row * At::ROW + column,
                weights + ((int64_t)filter * channels + column) * (KH * KW) + at, filter < filters && column < remaining);
        }
        k += BK;
    }
};

KERNEL __launch_bounds__(THREADS, MIN_BLOCKS) conv2d_input_grad(const T *g, const T *w, const Epilogue epilogue,
    CONV_NUMBERS) {
    wait_for_inputs();
    CONV
    const int tiles_m = (group_channels + BM - 1) / BM, group = blockIdx.y;
    const int m0 = blockIdx.x % tiles_m * BM, n0 = blockIdx.x / tiles_m * BN;
    // The phase's pixels are phase_y + SH i, phase_x + SW j. With stride 1 these are constants.
    const int phase_y = SH == 1 ? 0 : blockIdx.z / SW, phase_x = SW == 1 ? 0 : blockIdx.z % SW;
    const int phase_rows = (height - phase_y + SH - 1) / SH, phase_columns = (width - phase_x + SW - 1) / SW;
    const int area = phase_rows * phase_columns, pixels = batch * area;
    if (n0 >= pixels) return;
    const int first_y = first_tap<SH, PH, DH, TAP_STEP_Y>(phase_y, KH);
    const int first_x = first_tap<SW, PW, DW, TAP_STEP_X>(phase_x, KW);
    const int taps_y = (KH - first_y + TAP_STEP_Y - 1) / TAP_STEP_Y;
    const int taps_x = (KW - first_x + TAP_STEP_X - 1) / TAP_STEP_X;
    const int taps = group_filters * taps_y * taps_x;
    static_assert(BN % THREADS == 0, "a thread always has the same pixels");
    BlockTile tile;

    const int64_t first_weight = ((int64_t)group * group_filters * group_channels + m0) * (KH * KW);
    TapLoader weights = {
        w + first_weight + first_y * KW + first_x, group_filters, group_channels, group_channels - m0, taps_y, taps_x};
    WindowLoader windows(
        group_filters, rows, columns, taps_y, taps_x, -DH * TAP_STEP_Y / SH, -DW * TAP_STEP_X / SW);
    #pragma unroll
    for (int i = 0; i < WindowLoader::OWN; i++) {
        const int pixel = n0 + threadIdx.x + i * THREADS, image = pixel / area, at = pixel % area;
        const T *source = g + ((int64_t)image * filters + group * group_filters) * rows * columns;
        const int y = at / phase_columns + (phase_y + PH - first_y * DH) / SH;
        const int x = at % phase_columns + (phase_x + PW - first_x * DW) / SW;
        if (pixel < pixels)
            windows.set(i, source, y, x);
        else
            windows.set(i, g, OUTSIDE, OUTSIDE);
    }
    tile.multiply(weights, windows, (taps + BK - 1) / BK);
    if (tile.slice > 0) return;
    write_tile(tile, epilogue, m0, n0, group_channels, pixels, [&](int pixel) {
        const int at = pixel % area, row = at / phase_columns * SH + phase_y,
            column = at % phase_columns * SW + phase_x;
        return OutputColumn{pixel / area, group * group_channels, channels, row * width + column, (int64_t)height * width};
    });
}
#else // WEIGHT_GRAD
// Weight gradient: images x (N, C, H, W) and output gradients g (N, O, OH, OW) to (O, C / groups, KH, KW).
//
// A matrix product for each group: rows are filters, columns the elements of a window, k the pixels of all outputs. K
// is long and is split; gemm/split_k_sum.cu sums the splits in order.

// Pixel k of the outputs: its image, its offset in g's first filter, and the corner of its window.
struct Pixel {
    int image, at, y, x;
    __device__ Pixel(int k, int area, int columns)
        : image(k / area), at(k % area), y(at / columns * SH - PH), x(at % columns * SW - PW) {}
};

// Loads panels [pixel][filter] of g.
struct GradientLoader {
    typedef PanelsA At;
    const T *source; // the tile's first filter
    int64_t image_step;
    int area, columns, remaining, k, end; // remaining: filters from the tile's first one; k, end: pixels

    __device__ __forceinline__ void load(T *panel) {
        #pragma unroll
        for (int i = 0; i < At::COPIES; i++) {
            const int row = At::row(i), column = At::column(i);
            const Pixel pixel(k + row, area, columns);
            cp_async<sizeof(T)>(panel + row * At::ROW + column,
                source + pixel.image * image_step + column * area + pixel.at, k + row < end && column < remaining);
        }
        k += BK;
    }
};

// Loads panels [pixel][element of its window] of x.
struct ElementLoader {
    typedef PanelsB At;
    const T *source; // the group's first channel
    int64_t image_step;
    int height, width, area, columns, k, end;
    int offset[At::OWN], dy[At::OWN], dx[At::OWN]; // from the window's corner to the elements that this thread loads

    __device__ ElementLoader(
        const T *source, int64_t image_step, int height, int width, int area, int columns, int k, int end, int n0,
            int n)
        : source(source), image_step(image_step), height(height), width(width), area(area), columns(columns), k(k),
          end(end) {
        #pragma unroll
        for (int i = 0; i < At::OWN; i++) {
            const int element = n0 + At::column(i), tap = element % (KH * KW);
            dy[i] = element < n ? tap / KW * DH : OUTSIDE;
            dx[i] = tap % KW * DW;
            offset[i] = element / (KH * KW) * height * width + tap / KW * DH * width + dx[i];
        }
    }

    __device__ __forceinline__ void load(T *panel) {
        #pragma unroll
        for (int i = 0; i < At::COPIES; i++) {
            const int row = At::row(i), own = i % At::OWN;
            const Pixel pixel(k + row, area, columns);
            const bool inside =
                (unsigned)(pixel.y + dy[own]) < height && (unsigned)(pixel.x + dx[own]) < width && k + row < end;
            cp_async<sizeof(T)>(panel + row * At::ROW + At::column(i),
                source + pixel.image * image_step + (pixel.y * width + pixel.x + offset[own]), inside);
        }
        k += BK;
    }
};

KERNEL __launch_bounds__(THREADS, MIN_BLOCKS) conv2d_weight_grad(const T *x, const T *g, T *w, CONV_NUMBERS,
    int64_t splits IF(SPLIT, , char *scratch)) {
    wait_for_inputs();
    CONV
    const int elements = group_channels * KH * KW, area = rows * columns, pixels = batch * area, group = blockIdx.z;
    const int tiles_m = (group_filters + BM - 1) / BM;
    const int m0 = blockIdx.x % tiles_m * BM, n0 = blockIdx.x / tiles_m * BN;
    const int stages = (pixels + BK - 1) / BK;
    const int begin = (int64_t)stages * blockIdx.y / splits, end = (int64_t)stages * (blockIdx.y + 1) / splits;
    const int last = min(pixels, end * BK);
    BlockTile tile;

    GradientLoader gradients = {g + ((int64_t)group * group_filters + m0) * area, (int64_t)filters * area, area,
        columns, group_filters - m0, begin * BK, last};
    ElementLoader windows(x + (int64_t)group * group_channels * height * width, (int64_t)channels * height * width,
        height, width, area, columns, begin * BK, last, n0, elements);
    tile.multiply(gradients, windows, end - begin);
    if (tile.slice > 0) return;
#if SPLIT
    T *out = (T *)scratch + (int64_t)blockIdx.y * filters * elements;
#else
    T *out = w;
#endif
    write_tile(tile, Store{out}, m0, n0, group_filters, elements,
        [&](int element) { return OutputColumn{0, group * group_filters, 0, element, elements}; });
}
#endif
