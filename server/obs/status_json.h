// A snapshot and its history as the page at / wants them.
#pragma once

#include <string>
#include <vector>

#include "server/obs/history.h"
#include "server/obs/snapshot.h"

namespace awqd::obs {

// One object: version, ready, models, devices, methods, process, limits, history.
std::string StatusJson(const Snapshot& snapshot, const std::vector<HistoryPoint>& history);

}  // namespace awqd::obs
