/* The smallest elements. The result is NaN if an element is: no comparison replaces it. */

#define NAME min
#define U T
#define PART T
#define TOTAL T
#define START                                                                                            \
    _Generic((T)0, float: __builtin_inff(), double: __builtin_inf(), int64_t: INT64_MAX, int32_t: INT32_MAX, \
             default: (T)UINT32_MAX)
#define FOLD(result, x) ((x) < (result) ? (x) : (result))
#define COMBINE(result, x) ((x) < (result) || (x) != (x) ? (x) : (result))
#define LOSES_NAN _Generic((T)0, float: true, double: true, default: false)
#include "reduce.h"
