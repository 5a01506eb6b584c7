/* The weights of the eight corners for a point in [-1, 1]^3. Corner 4 i + 2 j + k is at the end (1) or start (0) of axes 0, 1, 2. */
static inline void corner_weights(const T *point, T *weights) {
    for (int c = 0; c < 8; c++) {
        weights[c] = 1;
        for (int axis = 0; axis < 3; axis++) {
            const T end = (point[axis] + 1) / 2;
            weights[c] *= c >> (2 - axis) & 1 ? end : 1 - end;
        }
    }
}
