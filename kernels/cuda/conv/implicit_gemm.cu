// y = x * w: images (N, C, H, W), weights (O, C / groups, KH, KW), output (N, O, OH, OW). Read conv/implicit_gemm.cuh
// first.
//
// A matrix product for each group: rows are filters, columns the pixels of all outputs, k the elements of a window.
#include "conv/implicit_gemm.cuh"

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
