// The steps of a call, from the moments that its flow noted.
#include "server/obs/call_record.h"

namespace awqd::obs {

std::vector<CallStep> StepsOf(const CallRecord& record) {
  std::vector<CallStep> out;
  const RequestMoments& moments = record.sum.moments;
  if (record.sum.requests == 1 && moments.begun > absl::InfinitePast()) {
    const bool submitted = moments.submitted > absl::InfinitePast();
    out.push_back({"stage", moments.begun, submitted ? moments.submitted : moments.settled});
    if (submitted) {
      // Of a call that failed or was withdrawn before it ran, only the end is known.
      const absl::Time computing =
          std::min(moments.settled, moments.submitted + absl::Microseconds(record.sum.queue_us));
      const absl::Time computed =
          std::min(moments.settled, computing + absl::Microseconds(record.sum.compute_us));
      const bool ran = record.sum.compute_us > 0;
      out.push_back({"queue", moments.submitted, ran ? computing : moments.settled});
      if (ran) {
        out.push_back({"compute", computing, computed});
        out.push_back({"answer", computed, moments.settled});
      }
    }
  }
  out.push_back({"send", record.answered, record.ended});
  return out;
}

}  // namespace awqd::obs
