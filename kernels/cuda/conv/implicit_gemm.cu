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
