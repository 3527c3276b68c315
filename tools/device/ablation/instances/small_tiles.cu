// SPDX-License-Identifier: Apache-2.0
#include "device/ablation/instance.cuh"

namespace flash3::device {

using Traits = Fp16Traits<Variant::kSmallTiles>;

}

FLASH3_ABLATION_INSTANCE(kFloat16, kSmallTiles, Traits, TmaProducer<Traits>, Consumer16Bit<Traits>)
