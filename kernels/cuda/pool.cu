// Pooling of planes (channels of all images): height x width to rows x columns windows. Max pooling also says where in
// its window each maximum is, counted row by row; put and pick move numbers to and from the places it chose.
//
// Where windows overlap, put and avg_pool2d_put do not scatter: an element of the image gathers from the windows it lies
// in, in a fixed order, so that the sums are the same in every run.
//
// The geometry is compiled in, so that the loops over a window have no ends to compute: window KH x KW, stride SH x SW,
// padding PH x PW.
#ifndef KH
#define KH 2
#define KW 2
#define SH 2
#define SW 2
#define PH 0
#define PW 0
#endif
#include "common.cuh"

#define POOL_NUMBERS int64_t planes, int64_t height_, int64_t width_, int64_t rows_, int64_t columns_
#define POOL const int height = height_, width = width_, rows = rows_, columns = columns_;

// Which plane of so many elements number i lies in, and where. A 64-bit division takes longer than all the rest.
struct Place {
    int64_t plane;
    int at;
    __device__ Place(int64_t i, int area) {
        plane = i <= 0xffffffffu ? (unsigned)i / (unsigned)area : i / area;
        at = i - plane * area;
    }
};

// The window that output number i belongs to: its plane, and its corner there.
struct Corner {
    int64_t plane;
    int y, x;
    __device__ Corner(int64_t i, int rows, int columns) {
        const Place place(i, rows * columns);
        plane = place.plane;
        y = place.at / columns * SH - PH;
        x = place.at % columns * SW - PW;
    }
};

__device__ __forceinline__ bool inside(int y, int x, int height, int width) {
    return (PH == 0 || (unsigned)y < height) && (PW == 0 || (unsigned)x < width);
}

KERNEL max_pool2d(const T *x, T *y, int32_t *where, POOL_NUMBERS) {
    wait_for_inputs();
    POOL
    for (int64_t i = grid_index(); i < planes * rows * columns; i += grid_size()) {
        const Corner corner(i, rows, columns);
        const T *plane = x + corner.plane * height * width;
        T best = -INFINITY; // what the padding is filled with
        int position = -1;  // the first that is equal to the maximum; of a NaN the last of the window
        bool nan = false;
        #pragma unroll
        for (int tap = 0; tap < KH * KW; tap++) {
            const int row = corner.y + tap / KW, column = corner.x + tap % KW;
            const T value = inside(row, column, height, width) ? plane[row * width + column] : -(T)INFINITY;
            nan = nan || value != value;
            if (position < 0 || value > best) {
                best = value;
                position = tap;
            }
        }
        y[i] = nan ? (T)NAN : best;
        where[i] = nan ? KH * KW - 1 : position;
    }
}

KERNEL max_pool2d_pick(const T *x, const int32_t *where, T *y, POOL_NUMBERS) {
    wait_for_inputs();
    POOL
    for (int64_t i = grid_index(); i < planes * rows * columns; i += grid_size()) {
        const Corner corner(i, rows, columns);
        const int position = where[i], row = corner.y + position / KW, column = corner.x + position % KW;
        const bool real = inside(row, column, height, width); // a window of -infinity may choose the padding
        y[i] = real ? x[corner.plane * height * width + row * width + column] : (T)0;
    }
}

KERNEL avg_pool2d(const T *x, T *y, POOL_NUMBERS) {
    wait_for_inputs();
    POOL
    for (int64_t i = grid_index(); i < planes * rows * columns; i += grid_size()) {
        const Corner corner(i, rows, columns);
        const T *plane = x + corner.plane * height * width;
        T total = 0;
        #pragma unroll
        for (int tap = 0; tap < KH * KW; tap++) {
            const int row = corner.y + tap / KW, column = corner.x + tap % KW;
            if (inside(row, column, height, width)) total += plane[row * width + column];
        }
        y[i] = total / (T)(KH * KW);
    }
}

// put and avg_pool2d_put: a thread makes a cell of elements of the image, those that share their last window: SH x SW
// of them, unless the stride is so long that single elements are enough work for all threads.
constexpr int CELL_Y = SH * SW <= 16 ? SH : 1, CELL_X = SH * SW <= 16 ? SW : 1;
constexpr int OVER_Y = (KH + SH - 1) / SH, OVER_X = (KW + SW - 1) / SW; // windows that lie over one element, at most

// Fills the image with sums of share(window, position): the window's number, and the element's position in it.
template <class Share>
__device__ __forceinline__ void gather(
    T *__restrict__ x, int64_t planes, int height, int width, int rows, int columns, Share share) {
    const int cells_y = (height + PH + CELL_Y - 1) / CELL_Y, cells_x = (width + PW + CELL_X - 1) / CELL_X;
    for (int64_t i = grid_index(); i < planes * cells_y * cells_x; i += grid_size()) {
        const Place place(i, cells_y * cells_x);
        const int top = place.at / cells_x * CELL_Y, left = place.at % cells_x * CELL_X; // in the padded image
        const int phase_y = CELL_Y == SH ? 0 : top % SH, phase_x = CELL_X == SW ? 0 : left % SW;
        T totals[CELL_Y][CELL_X] = {};
        #pragma unroll
        for (int up = 0; up < OVER_Y; up++) {
            #pragma unroll
            for (int back = 0; back < OVER_X; back++) {
                const int row = top / SH - up, column = left / SW - back;
                if ((unsigned)row >= rows || (unsigned)column >= columns) continue;
                const int64_t window = (place.plane * rows + row) * columns + column;
                #pragma unroll
                for (int a = 0; a < CELL_Y; a++) {
                    #pragma unroll
                    for (int b = 0; b < CELL_X; b++) {
                        const int tap_y = phase_y + a + up * SH, tap_x = phase_x + b + back * SW;
                        if (tap_y < KH && tap_x < KW) totals[a][b] += share(window, tap_y * KW + tap_x);
                    }
                }
            }
        }
        #pragma unroll
        for (int a = 0; a < CELL_Y; a++) {
            #pragma unroll
            for (int b = 0; b < CELL_X; b++) {
                const int y = top + a - PH, column = left + b - PW;
                if ((unsigned)y < height && (unsigned)column < width)
                    x[(place.plane * height + y) * width + column] = totals[a][b];
            }
        }
    }
}

KERNEL max_pool2d_put(const T *__restrict__ ct, const int32_t *__restrict__ where, T *x, POOL_NUMBERS) {
    wait_for_inputs();
    POOL
    gather(x, planes, height, width, rows, columns,
        [&](int64_t window, int position) { return where[window] == position ? ct[window] : (T)0; });
}

KERNEL avg_pool2d_put(const T *__restrict__ ct, T *x, POOL_NUMBERS) {
    wait_for_inputs();
    POOL
    gather(x, planes, height, width, rows, columns,
        [&](int64_t window, int position) { return ct[window] / (T)(KH * KW); });
}
