// SPDX-License-Identifier: Apache-2.0
// All that the case table, the command line and the fuzz targets take from inside the library; for
// everything else they call flash3.h, as a user does (cli/environment.cpp asks for the cores too).
// Element conversion and sizes (core/convert.hpp, core/problem.hpp) are for data on the host,
// problems for the oracles, masks and sequences for what a case counts, and a mask's lists for what
// it holds. The measuring kernels in tools/device and bench are variants of the library's kernels,
// and include those.
#pragma once

#include "core/convert.hpp"
#include "core/mask.hpp"
#include "core/mask_lists.hpp"
#include "core/problem.hpp"
#include "core/seq_info.hpp"
#include "core/tensor_checks.hpp"
