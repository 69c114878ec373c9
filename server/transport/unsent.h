// Whether peers have everything that was written to them.
#pragma once

namespace awqd::transport {

// True when no TCP connection of this process holds bytes that the peer's kernel has not
// acknowledged: closing one that does may lose them. Unix domain sockets have nothing on the way.
bool AllSent();

}  // namespace awqd::transport
