-- SPDX-License-Identifier: Apache-2.0 OR MIT
-- Script for wrk, run as `wrk -s whole.lua ... -- FILE`: compares the body of each answer with the content of FILE and
-- prints how many were equal and how many were not.
local threads = {}

function setup(thread)
  table.insert(threads, thread)
end

function init(args)
  local file = assert(io.open(args[1], "rb"))
  whole = file:read("*a")
  right, wrong = 0, 0
end

function response(status, headers, body)
  if status == 200 and body == whole then
    right = right + 1
  else
    wrong = wrong + 1
  end
end

function done(summary, latency, requests)
  local right, wrong = 0, 0
  for _, thread in ipairs(threads) do
    right = right + thread:get("right")
    wrong = wrong + thread:get("wrong")
  end
  print("right answers: " .. right)
  print("wrong answers: " .. wrong)
end
