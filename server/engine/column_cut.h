// Cuts works whose result is columns of a weight at the borders between devices.
#pragma once

#include <cstdint>
#include <memory>

#include "absl/functional/function_ref.h"
#include "server/engine/work.h"
#include "server/model/placed_weight.h"

namespace awqd::engine {

// A result of `rows` rows of the columns `wanted` of `weight`, `element_bytes` each.
struct ColumnResult {
  const model::PlacedWeight& weight;
  model::ColumnSpan wanted;
  int64_t rows = 0;
  int64_t element_bytes = 0;
};

// One part for each part of the weight that holds wanted columns; `make` makes the work that
// computes `columns` (of the whole weight) there. No column at all is one part of no columns.
WorkCut CutAtColumns(
    const ColumnResult& result,
    absl::FunctionRef<std::unique_ptr<Work>(size_t part, model::ColumnSpan columns)> make);

}  // namespace awqd::engine
