// standardize: mean 0 and variance 1 over r0 and r1 of an array of shape (k0, r0, k1, r1).
//
// The first element is subtracted from the others before they are added, so that numbers that are all alike become 0.
// There are three launches: the moments of parts, the moments of each output, and the result. Rows that a block can hold are
// standardized by generated kernels.
//
// x and y have elements of type S, which may be bfloat16. Arithmetic and statistics have type T.
#include "common/collectives.cuh"

#ifndef WIDTH
#define WIDTH 1
#endif
#define THREADS 256

typedef StoredAs<U>::type S;

// Count, mean, and sum of squared deviations of a set of numbers.
struct Moments {
    T count, mean, squares;
};

static __device__ __forceinline__ Moments shuffle_xor(const Moments &m, int mask) {
    return {shuffle_xor(m.count, mask), shuffle_xor(m.mean, mask), shuffle_xor(m.squares, mask)};
}

// The moments of the union of two sets (T. Chan, G. Golub, R. LeVeque, 1983).
struct MergeMoments {
    static __device__ __forceinline__ Moments of(const Moments &a, const Moments &b) {
        const T count = a.count + b.count, share = count > 0 ? b.count / count : (T)0, apart = b.mean - a.mean;
        return {count, a.mean + apart * share, a.squares + b.squares + apart * apart * a.count * share};
    }
};

// The vectors of a thread, one after another: those of a column of elements.
struct Column {
    const S *at;
    int64_t step;

    __device__ __forceinline__ const S *next() {
        const S *from = at;
        at += step;
        return from;
    }
};

// The same for every THREADS-th vector of runs of `length` vectors, which start `pitch` elements apart.
struct Runs {
    const S *at;
    int64_t index, length, step, to_next_run;
    int forward;

    __device__ __forceinline__ Runs(const S *x, int64_t length, int64_t pitch) : length(length) {
        const int run = length < THREADS ? threadIdx.x / (int)length : 0;
        const int runs = length > THREADS ? 0 : THREADS / (int)length; // that THREADS vectors are, besides `forward` vectors
        index = threadIdx.x - run * length;
        forward = THREADS - runs * (int)min(length, (int64_t)THREADS);
        at = x + run * pitch + index * WIDTH;
        step = runs * pitch + forward * WIDTH;
        to_next_run = pitch - length * WIDTH;
    }

    __device__ __forceinline__ const S *next() {
        const S *from = at;
        at += step, index += forward;
        if (index >= length) at += to_next_run, index -= length;
        return from;
    }
};

// The moments of `count` vectors of W elements and those that were `found` before. LOADS vectors are processed at a time: their
// mean, then the deviations from it, so that no digits cancel.
template <int W, typename Vectors>
static __device__ __forceinline__ Moments moments_of(Vectors vectors, int count, Moments found) {
    constexpr int LOADS = 8;
    for (; count > 0; count -= LOADS) {
        Vector<T, W> v[LOADS];
        #pragma unroll
        for (int k = 0; k < LOADS; k++) {
            const S *from = vectors.next();
            if (k < count) v[k] = load_as<T, W>(from);
        }
        const T first = v[0].lane[0], size = (T)(min(count, LOADS) * W);
        T sums[W] = {}, squares[W] = {}; // by lane, so that additions need not wait for one another
        #pragma unroll
        for (int k = 0; k < LOADS; k++)
            if (k < count)
                #pragma unroll
                for (int i = 0; i < W; i++) v[k].lane[i] -= first, sums[i] += v[k].lane[i];
        #pragma unroll
        for (int i = 1; i < W; i++) sums[0] += sums[i];
        const T mean = sums[0] / size;
        #pragma unroll
        for (int k = 0; k < LOADS; k++)
            if (k < count)
                #pragma unroll
                for (int i = 0; i < W; i++)
                    v[k].lane[i] -= mean, squares[i] = fma(v[k].lane[i], v[k].lane[i], squares[i]);
        #pragma unroll
        for (int i = 1; i < W; i++) squares[0] += squares[i];
        found = MergeMoments::of(found, {size, first + mean, squares[0]});
    }
    return found;
}

// The moments of parts, to scratch[o * parts + part]. A block has `across` neighbouring outputs of one index of k0. With one
// output it reads runs of r1 elements by vectors. With WARP outputs a thread reads elements of stride k1.
KERNEL __launch_bounds__(THREADS, 2)
standardize_parts(const S *x, S *, T *, T *, int64_t k0, int64_t r0, int64_t k1, int64_t r1, int64_t across, int64_t parts,
                  int64_t chunk, char *scratch) {
    wait_for_inputs();
    __shared__ Moments of_warp[THREADS / WARP][WARP];
    const int64_t tiles = (k1 + across - 1) / across, tile = blockIdx.x / parts, part = blockIdx.x % parts;
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const int64_t outer = tile / tiles, begin = part * chunk, end = min(begin + chunk, r0);
    Moments found = {0, 0, 0};
    if (across == 1) {
        const int64_t column = tile % tiles, length = r1 / WIDTH;
        const int count = ((end - begin) * length + THREADS - 1 - threadIdx.x) / THREADS;
        const Runs runs(x + ((outer * r0 + begin) * k1 + column) * r1, length, k1 * r1);
        found = over_block<MergeMoments>(moments_of<WIDTH>(runs, count, found));
        if (threadIdx.x == 0) SCRATCH_MOMENTS(Moments, scratch)[blockIdx.x] = found;
        return;
    }
    const int64_t column = tile % tiles * WARP + lane;
    if (column < k1 && begin < end) {
        const Column elements = {x + (outer * r0 + begin + warp) * k1 + column, THREADS / WARP * k1};
        const int count = (end - begin + THREADS / WARP - 1 - warp) / (THREADS / WARP);
        found = moments_of<1>(elements, count, found);
    }
    of_warp[warp][lane] = found;
    __syncthreads();
    if (warp == 0 && column < k1) {
        for (int w = 1; w < THREADS / WARP; w++) found = MergeMoments::of(found, of_warp[w][lane]);
        SCRATCH_MOMENTS(Moments, scratch)[(outer * k1 + column) * parts + part] = found;
    }
}

// A warp per output combines the moments of its parts.
KERNEL standardize_combine(const S *, S *, T *means, T *variances, int64_t outputs, int64_t parts, char *scratch) {
    wait_for_inputs();
    for (int64_t o = grid_index() / WARP; o < outputs; o += grid_size() / WARP) {
        Moments found = {0, 0, 0};
        for (int64_t p = threadIdx.x % WARP; p < parts; p += WARP)
            found = MergeMoments::of(found, SCRATCH_MOMENTS(Moments, scratch)[o * parts + p]);
        found = over_lanes<MergeMoments, WARP>(found);
        if (threadIdx.x % WARP == 0) {
            means[o] = found.mean;
            variances[o] = found.squares / found.count;
        }
    }
}

// The result, WIDTH neighbouring elements at a time: of one output where r1 > 1, otherwise of WIDTH outputs.
template <typename I>
static __device__ __forceinline__ void standardize_elements(const S *x, S *y, const T *means, const T *variances, int64_t count,
                                               int64_t r0, int64_t k1, int64_t r1, T eps) {
    const Divisor<I> by_r1(r1 > 1 ? r1 / WIDTH : 1), by_k1(r1 > 1 ? k1 : k1 / WIDTH), by_r0(r0);
    for (int64_t g = grid_index(); g < count / WIDTH; g += grid_size()) {
        I rest = (I)g, column = by_r1(rest);
        rest = column;
        I row = by_k1(rest); // rest: the column
        column = rest;
        rest = row;
        const int64_t output = by_r0(rest) * k1 + (int64_t)column * (r1 > 1 ? 1 : WIDTH);
        Vector<T, WIDTH> v = load_as<T, WIDTH>(x + g * WIDTH);
        #pragma unroll
        for (int k = 0; k < WIDTH; k++) {
            const int64_t o = output + (r1 > 1 ? 0 : k);
            v.lane[k] = (v.lane[k] - means[o]) * (1 / sqrt(variances[o] + eps));
        }
        store_as(y, g * WIDTH, v);
    }
}

KERNEL standardize_apply(const S *x, S *y, T *means, T *variances, int64_t k0, int64_t r0, int64_t k1, int64_t r1,
                         double eps, char *) {
    wait_for_inputs();
    const int64_t count = k0 * r0 * k1 * r1;
    if (count < (int64_t)1 << 31)
        standardize_elements<uint32_t>(x, y, means, variances, count, r0, k1, r1, (T)eps);
    else
        standardize_elements<int64_t>(x, y, means, variances, count, r0, k1, r1, (T)eps);
}
