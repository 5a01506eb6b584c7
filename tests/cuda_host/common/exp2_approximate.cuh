#pragma once

static float exp2_approximate(float x) { return exp2f(x); }
