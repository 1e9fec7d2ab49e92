#pragma once
/// The version of sash. The only place that states it: the build system reads these three lines.
#define SASH_VERSION_MAJOR 0
#define SASH_VERSION_MINOR 1
#define SASH_VERSION_PATCH 0
