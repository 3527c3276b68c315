// SPDX-License-Identifier: Apache-2.0
#include "device/ablation/instance.cuh"

namespace flash3::device {

using Traits = E4m3Traits<Variant::kSmallTiles>;

}

FLASH3_ABLATION_INSTANCE(kE4m3, kSmallTiles, Traits, Fp8Producer<Traits>, ConsumerFp8<Traits>)
