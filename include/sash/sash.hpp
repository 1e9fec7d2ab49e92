#pragma once
/// \file
/// The umbrella: all of sash but reference.hpp (which needs Eigen) and interop/. Needs xsimd and nothing else.
#include <sash/attend.hpp>
#include <sash/full.hpp>
#include <sash/gate.hpp>
#include <sash/hybrid.hpp>
#include <sash/layer.hpp>
#include <sash/linear.hpp>
#include <sash/partial.hpp>
#include <sash/sliding_window.hpp>
#include <sash/systems.hpp>
#include <sash/terraced_window.hpp>
