// SPDX-License-Identifier: Apache-2.0
#include "device/ablation/no_ping_pong.cuh"

namespace flash3::device {

using Traits = WithoutPingPong<Fp16Traits<Variant::kNoPingPong>>;

}

FLASH3_ABLATION_INSTANCE(kFloat16, kNoPingPong, Traits, TmaProducer<Traits>, Consumer16Bit<Traits>)
