// Each header behind the macros of systems' headers. Eigen, which does not bear them, comes before.
// clang-format off
#include <Eigen/Core>

#include "system_macros.hpp"

#include <focus/eigen.hpp>
#include <focus/focus.hpp>
#include <focus/reference.hpp>
// clang-format on
