// Batch: tasks that leave the queue together. Formed closed: nothing joins it once it was taken.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "server/batching/task.h"

namespace awqd::batching {

struct Batch {
  // One task, or several with equal keys; in the order in which their rows are concatenated.
  std::vector<std::unique_ptr<Task>> tasks;
  int64_t tokens = 0;  // sum over tasks

  bool empty() const { return tasks.empty(); }
};

}  // namespace awqd::batching
