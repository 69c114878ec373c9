// The engine over several devices: a request runs on one that holds its weight, or on all that hold
// parts of it.
#pragma once

#include <memory>
#include <vector>

#include "server/engine/engine.h"

namespace awqd::engine {

// `engines`: one or more, each over its own device.
//
// A weight that several devices hold whole: a request runs on the one of those that work with the
// fewest tokens queued and running (a Dequantize counts its rows); devices with equal load take
// turns; if one refuses, the next.
// A weight that is partitioned (tensor parallel), or a stack that is expert parallel: a request is
// one task on each device that holds columns, rows or experts it wants. Nothing on a device ever
// waits for another, so that no order of requests can block; the last part to end answers. A part
// that fails, expires or is refused withdraws the others, and its status is the request's. A work
// without weights runs on any device, chosen as among those that hold a weight whole. Inline
// weights go to the device that works with the fewest tokens; among equals, to the one with most
// free memory. A device that has failed fails what it has, and is given nothing more; the others go
// on.
std::unique_ptr<Engine> MakeRoutingEngine(std::vector<std::unique_ptr<Engine>> engines);

}  // namespace awqd::engine
