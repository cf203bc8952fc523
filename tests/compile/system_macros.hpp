// The macros min and max, as <windows.h> leaves them behind: after the standard library, before
// this one.
#pragma once

#include <bits/stdc++.h>

#define min(a, b) (((a) < (b)) ? (a) : (b))
#define max(a, b) (((a) > (b)) ? (a) : (b))
