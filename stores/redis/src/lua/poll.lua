local answer = { redis.call('PEXPIRE', BASE .. 'client:' .. ARGV[3], CLAIM) }
local keys = names_at(3, (#KEYS - 2) / 3)
for _, key in ipairs(keys) do redis.call('PEXPIRE', BASE .. 'line:' .. key, CLAIM * 2) end
serve(keys)
flush()
for i, key in ipairs(names_at(3, (#KEYS - 2) / 3)) do
  answer[i + 1] = { redis.call('GET', key) or '', redis.call('GET', BASE .. 'held:' .. key) or '',
    redis.call('PTTL', key) }
end
return answer
