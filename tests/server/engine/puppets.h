// Puppets: a RoutingEngine over puppet engines, and its answers.
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "server/engine/engine.h"
#include "tests/server/engine/puppet_engine.h"

namespace awqd::engine {

struct Answered {
  int times = 0;
  absl::Status status;
  std::string bytes;
  ExecutionReport report;
};

class Puppets : public ::testing::Test {
 protected:
  void Start(int devices) {
    std::vector<std::unique_ptr<Engine>> engines;
    for (int i = 0; i < devices; ++i) {
      auto puppet = std::make_unique<PuppetEngine>(i);
      puppets_.push_back(puppet.get());
      engines.push_back(std::move(puppet));
    }
    engine_ = MakeRoutingEngine(std::move(engines));
  }

  // A weight that is whole on every device.
  std::shared_ptr<const model::PlacedWeight> Replicas(int64_t n) {
    auto out = std::make_shared<model::PlacedWeight>();
    out->shape = {.k = 16, .n = n};
    for (PuppetEngine* puppet : puppets_) {
      out->parts.push_back({ShapeOn(puppet->puppet_device(), n), 0});
    }
    return out;
  }
  // A weight with `widths` columns on the devices.
  std::shared_ptr<const model::PlacedWeight> Columns(const std::vector<int64_t>& widths) {
    auto out = std::make_shared<model::PlacedWeight>();
    int64_t next = 0;
    for (size_t i = 0; i < widths.size(); ++i) {
      out->parts.push_back({ShapeOn(puppets_[i]->puppet_device(), widths[i]), next});
      next += widths[i];
    }
    out->shape = {.k = 16, .n = next};
    return out;
  }

  MatmulWork Product(std::shared_ptr<const model::PlacedWeight> weight, int64_t tokens) {
    MatmulWork work;
    work.weight = std::move(weight);
    work.rows = tokens;
    work.x = *engine_->staging().Get(tokens * 16 * 2);
    return work;
  }

  // Submits work, whose answer will be in `answers_`; returns the index of the submission.
  template <typename AnyWork>
  absl::StatusOr<TaskHandle> Submit(AnyWork work, const SubmitOptions& options = {}) {
    answers_.push_back(std::make_unique<Answered>());
    return engine_->Submit(
        std::make_unique<AnyWork>(std::move(work)), options,
        [answer = answers_.back().get()](const absl::Status& status, const Payload& result,
                                         const ExecutionReport& report) {
          ++answer->times;
          answer->status = status;
          answer->bytes = std::string(result.view());
          answer->report = report;
        });
  }
  const Answered& answer(size_t index) const { return *answers_[index]; }

  std::vector<std::unique_ptr<Answered>> answers_;  // outlives the engines
  std::vector<PuppetEngine*> puppets_;
  std::unique_ptr<Engine> engine_;
};

}  // namespace awqd::engine
