local answer = { redis.call('PEXPIRE', KEYS[3], CLAIM) }
local keys = every(4, 3)
for _, key in ipairs(keys) do redis.call('PEXPIRE', BASE .. 'line:' .. key, CLAIM * 2) end
serve(keys)
flush()
for i, key in ipairs(every(4, 3)) do
  answer[i + 1] = { redis.call('GET', key) or '', redis.call('GET', BASE .. 'held:' .. key) or '',
    redis.call('PTTL', key) }
end
return answer
