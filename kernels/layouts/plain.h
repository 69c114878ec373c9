// Declares the layout "plain".
#pragma once

#include "kernels/layouts/layout.h"

namespace awqd {
extern const Layout kPlainLayout;
}  // namespace awqd
