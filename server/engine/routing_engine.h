// An engine over several devices: work goes to the device its weight lives on.
#pragma once

#include <memory>
#include <vector>

#include "server/engine/engine.h"

namespace awqd {

// `engines`: one or more, each over its own device. Inline weights go to the device with most free
// memory.
std::unique_ptr<Engine> MakeRoutingEngine(std::vector<std::unique_ptr<Engine>> engines);

}  // namespace awqd
