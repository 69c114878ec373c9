// Which parts of a weight hold the columns of a result.
#include "server/engine/column_cut.h"

#include <algorithm>

namespace awqd::engine {

WorkCut CutAtColumns(
    const ColumnResult& result,
    absl::FunctionRef<std::unique_ptr<Work>(size_t part, model::ColumnSpan columns)> make) {
  const auto& [weight, wanted, rows, element_bytes] = result;
  WorkCut out = {.rows = rows, .row_bytes = (wanted.end - wanted.begin) * element_bytes};
  const auto add = [&](size_t part, model::ColumnSpan columns) {
    std::unique_ptr<Work> work = make(part, columns);
    work->part = part;
    out.parts.push_back({std::move(work), (columns.begin - wanted.begin) * element_bytes,
                         (columns.end - columns.begin) * element_bytes});
  };
  for (size_t i = 0; i < weight.parts.size(); ++i) {
    const model::WeightPart& part = weight.parts[i];
    const model::ColumnSpan columns = {std::max(wanted.begin, part.col_begin),
                                       std::min(wanted.end, part.col_end())};
    if (columns.begin < columns.end) add(i, columns);
  }
  // No columns at all still get an answer.
  if (out.parts.empty()) add(0, {0, 0});
  return out;
}

}  // namespace awqd::engine
