// The flags, before they become Options.
#pragma once

#include <cstdint>
#include <string>

#include "CLI/CLI.hpp"
#include "server/options.h"

namespace awqd {

// What flags are read into: Options where the types agree, else plain numbers with units in their
// names. Values are in range once CLI11 has parsed them.
struct Flags {
  Options options;
  int64_t drain_delay_ms = 0;
  double drain_timeout_s = 30;
  double max_queue_delay_us = 0;
  double max_starvation_ms = 500;
  double keepalive_time_s = 120;
  double keepalive_timeout_s = 20;
  double min_ping_interval_s = 10;
  double max_connection_idle_s = 0;
  double max_connection_age_s = 0;
  double max_connection_age_grace_s = 0;
  int64_t memory_quota_bytes = 0;
  int unix_socket_mode = 0660;
  std::string shard = "replicas";
  std::string log_level = "info";
  std::string log_format = "text";
};

// Registers every flag, with its group, its help and its environment twin, to be read into `flags`,
// which must outlive `app`.
void AddFlags(CLI::App* app, Flags* flags);

}  // namespace awqd
