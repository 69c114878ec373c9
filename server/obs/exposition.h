// Exposition: a snapshot in the text that Prometheus scrapes.
#pragma once

#include <string>

#include "server/obs/snapshot.h"

namespace awqd::obs {

// Names and labels are listed in README.md. Labels are methods of the server's table, codes,
// devices, kernel rows, and models that are served or being loaded: nothing that a client makes up.
std::string PrometheusText(const Snapshot& snapshot);

}  // namespace awqd::obs
