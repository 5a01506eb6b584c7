/* The smallest elements. NaN is the result wherever it is an element: once in, no comparison lets another in. */

#define NAME min
#define U T
#define PART T
#define TOTAL T
#define START                                                                                            \
    _Generic((T)0, float: __builtin_inff(), double: __builtin_inf(), int64_t: INT64_MAX, int32_t: INT32_MAX, \
             default: (T)UINT32_MAX)
#define FOLD(result, x) ((x) < (result) || (x) != (x) ? (x) : (result))
#include "reduce.h"
