// The O(n^2) textbook form of each function of the library, in double, for users' own checks and
// for our tests.
//
// focus::reference::f takes the arguments of focus::f, checks them alike, and computes what the
// equations say by the plainest loops: no tiles, no vectors, no plan of cells. An executor is
// accepted and ignored. Results are rounded once, to the output's storage type.
#pragma once

#include "focus/reference/attention.hpp"
#include "focus/reference/attention_backward.hpp"
#include "focus/reference/decode.hpp"
#include "focus/reference/retained_mass.hpp"
#include "focus/reference/routing.hpp"
#include "focus/reference/routing_backward.hpp"
