-- Decides about the buckets of a rate limit. KEYS: the buckets; ARGV: 'take', 'peek', 'reset' or 'refund', and how long a take may wait; then for
-- each bucket what the tokens cost, how long an empty bucket needs to become full, and for a refund the instant that the take returned.
-- Returns whether the request is allowed, the server's clock, and for each bucket the instant at which it is full.
-- Times are nanoseconds in decimal digits. A Lua number is exact up to 2^53, so the script computes with pairs: seconds, and nanoseconds below them.
-- `core::limit` has the same arithmetic, and says why.
local E9 = 1000000000
local function parse(text)
  if #text <= 9 then return 0, tonumber(text) end
  return tonumber(string.sub(text, 1, -10)), tonumber(string.sub(text, -9))
end
local function plus(s, n, s2, n2)
  s, n = s + s2, n + n2
  if n >= E9 then return s + 1, n - E9 end
  return s, n
end
local function minus(s, n, s2, n2)
  s, n = s - s2, n - n2
  if n < 0 then return s - 1, n + E9 end
  return s, n
end
local function later(s, n, s2, n2)
  return s > s2 or (s == s2 and n > n2)
end
local operation = ARGV[1]
local time = redis.call('TIME')
local now_s, now_n = tonumber(time[1]), tonumber(time[2]) * 1000
local wait_s, wait_n = parse(ARGV[2])
local until_s, until_n = plus(now_s, now_n, wait_s, wait_n)
local allowed = 1
local before_s, before_n, after_s, after_n = {}, {}, {}, {}
for i = 1, #KEYS do
  local cost_s, cost_n = parse(ARGV[3 * i])
  local fill_s, fill_n = parse(ARGV[3 * i + 1])
  local s, n = now_s, now_n
  local found = redis.call('GET', KEYS[i])
  if found then
    local found_s, found_n = parse(found)
    if later(found_s, found_n, s, n) then s, n = found_s, found_n end
  end
  before_s[i], before_n[i] = s, n
  if operation == 'take' or operation == 'peek' then
    s, n = plus(s, n, cost_s, cost_n)
    local usable_s, usable_n = minus(s, n, fill_s, fill_n)
    if later(usable_s, usable_n, until_s, until_n) then allowed = 0 end
  elseif operation == 'reset' then
    s, n = now_s, now_n
  else
    local taken_s, taken_n = parse(ARGV[3 * i + 2])
    local back_s, back_n = 0, 0
    local usable_s, usable_n = minus(s, n, fill_s, fill_n)
    if later(usable_s, usable_n, now_s, now_n) then
      -- Places are reserved: only the last one comes back.
      if taken_s == s and taken_n == n then back_s, back_n = cost_s, cost_n end
    elseif later(taken_s, taken_n, now_s, now_n) then
      back_s, back_n = minus(taken_s, taken_n, now_s, now_n)
      if later(back_s, back_n, cost_s, cost_n) then back_s, back_n = cost_s, cost_n end
    end
    s, n = minus(s, n, back_s, back_n)
    if later(now_s, now_n, s, n) then s, n = now_s, now_n end
  end
  after_s[i], after_n[i] = s, n
end
local digits = '%.0f%09.0f'
local reply = { allowed, string.format(digits, now_s, now_n) }
local changes = allowed == 1 and operation ~= 'peek'
for i = 1, #KEYS do
  local s, n = before_s[i], before_n[i]
  if changes then
    s, n = after_s[i], after_n[i]
    if later(s, n, now_s, now_n) then
      -- The key ends when the bucket is full: then nothing is left.
      local left_s, left_n = minus(s, n, now_s, now_n)
      redis.call('SET', KEYS[i], string.format(digits, s, n), 'PX', string.format('%.0f', left_s * 1000 + math.ceil(left_n / 1000000)))
    else
      redis.call('DEL', KEYS[i])
    end
  end
  reply[i + 2] = string.format(digits, s, n)
end
return reply
